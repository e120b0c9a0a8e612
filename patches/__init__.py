"""Seven of this project's ideas as edits of torchtitan 0.2.2: `python -m patches --help`."""
