"""python -m patches apply PATH [--units 1 3] | diff PATH [--units 1 3] | undo PATH

PATH contains torchtitan 0.2.2's package `torchtitan`: a checkout, or the site-packages it is installed in.
"""

import argparse
import sys
from pathlib import Path

from patches.tool import Refusal, Target, load_units, unified_diff


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("patches", usage=__doc__)
    parser.add_argument("action", choices=("apply", "diff", "undo"))
    parser.add_argument("path", type=Path)
    units = load_units()
    parser.add_argument("--units", type=int, nargs="+", choices=units, default=list(units))
    args = parser.parse_args(argv)
    try:
        target = Target(args.path)
        if args.action == "diff":
            print("".join(unified_diff(target, units[n]) for n in sorted(set(args.units))), end="")
            return 0
        before = target.applied
        target.apply(args.units) if args.action == "apply" else target.undo()
        print(f"units {target.applied or 'none'} are applied (before: {before or 'none'})")
    except Refusal as refusal:
        print(f"patches: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
