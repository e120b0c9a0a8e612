"""One HTML page about a run: `python -m torchtitan.tools.report RUN_FOLDER`."""
