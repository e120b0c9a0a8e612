"""The path of 0.2.x for `torchtitan generate`, whose SOURCE is the option --checkpoint here."""

import argparse
import sys

from torchtitan.commands.generate import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    options, others = parser.parse_known_args()
    source = [options.checkpoint] if options.checkpoint else []
    sys.argv[1:] = [*source, "--max_new_tokens=32", *others]
    main()
