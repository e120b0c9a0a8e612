"""One HTML page about a run: `python -m torchtitan.report RUN_FOLDER`."""
