"""One HTML page about a run: `torchtitan report RUN_FOLDER`."""
