"""The earlier path of the command `python -m torchtitan.report`."""

from torchtitan.report.__main__ import main

if __name__ == "__main__":
    main()
