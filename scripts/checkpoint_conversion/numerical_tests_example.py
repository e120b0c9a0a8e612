"""The path of 0.2.x for `torchtitan compare`; --model_name X is --model.name X there, and so is the flavor."""

import re
import sys

from torchtitan.commands.compare import main

if __name__ == "__main__":
    sys.argv[1:] = [re.sub("^--model_(name|flavor)", r"--model.\1", x) for x in sys.argv[1:]]
    main()
