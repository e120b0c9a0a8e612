"""Difference that each layout makes to gradients, for each family: the table behind docs/measured.md.

    python benchmarks/layout_matrix.py [--only "CP 2" "PP 2, 1F1B"] [--families llama3 qwen3]
        [--batches "whole rows"] [--dtype bfloat16] [--against "FSDP 2"]

Three training steps of tiny models on 1, 2, 4 and 8 gloo ranks, on the same global batches: whole
rows (sdpa; flex for families with chunks or windows) and packed documents (flex, varlen). Shown is
max |Δgrad| / max |grad| per gradient, the largest over gradients and kinds of batches, against one
process or the layout `--against`; then the largest
differences of losses, gradient norms, weights and optimizer state after the last step. Initial
weights have to be equal to the last bit.
"""

import argparse
import sys
import tempfile

from common import print_header, print_row

from tests.distributed.layout_matrix import (
    BATCHES,
    FAMILIES,
    LAYOUTS,
    MOE_FAMILIES,
    MOE_LAYOUTS,
    ONE_PROCESS,
    Layout,
    Run,
    differences,
    measure,
)

# The last one is there for tests of what dense layers and experts have in common.
TABLED_FAMILIES = list(FAMILIES)[:-1]
OTHER_KINDS = ["loss", "grad_norm", "weights", "optimizer_state", "expert_bias"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="names of layouts")
    parser.add_argument("--families", nargs="+", choices=TABLED_FAMILIES, default=TABLED_FAMILIES)
    parser.add_argument("--batches", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    by_name = {layout.name: layout for layout in (ONE_PROCESS, *LAYOUTS)}
    parser.add_argument("--against", choices=by_name, default=ONE_PROCESS.name)
    args = parser.parse_args()
    flags = (f"--training.mixed_precision_param={args.dtype}",)
    cases = [(family, batch) for family in args.families for batch in args.batches]
    moe_cases = [case for case in cases if case[0] in MOE_FAMILIES]
    expected = _runs(by_name[args.against], cases, flags)
    print_header("layout", "ranks", *args.families, *OTHER_KINDS)
    for layout in LAYOUTS + MOE_LAYOUTS:
        if args.only and layout.name not in args.only:
            continue
        runs = _runs(layout, moe_cases if layout in MOE_LAYOUTS else cases, flags)
        _print_row(layout, args.families, runs, expected)


def _runs(
    layout: Layout, cases: list[tuple[str, str]], flags: tuple[str, ...]
) -> dict[tuple[str, str], Run]:
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(cases, measure(layout, cases, folder, flags), strict=True))


def _print_row(
    layout: Layout,
    families: list[str],
    runs: dict[tuple[str, str], Run],
    expected: dict[tuple[str, str], Run],
) -> None:
    found = {case: differences(run, expected[case]) for case, run in runs.items()}
    for case, run in runs.items():
        if run.hashes != expected[case].hashes:
            print(f"{layout.name}, {case}: initial weights differ", file=sys.stderr)
    cells = []
    for family in families:
        gradients = [one["gradient"] for case, one in found.items() if case[0] == family]
        cells.append(f"{max(gradients):.1e}" if gradients else "")
    cells += [f"{max(one[kind] for one in found.values()):.1e}" for kind in OTHER_KINDS]
    print_row(layout.name, layout.world_size, *cells)


if __name__ == "__main__":
    main()
