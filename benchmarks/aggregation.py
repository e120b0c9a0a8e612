"""How far losses and gradients of random splits are from what each aggregation's text says.

    python benchmarks/aggregation.py [--splits 60] [--ranks 2 4]

First a linear layer: each split deals the same sequences to 1 to 4 ranks, up to 12 microbatches
each and packed, padded rows, in one process and on gloo ranks. Then a tiny model through the engine on gloo ranks: the
largest difference of any parameter's gradient to one process, relative to its largest entry.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.distributed.layout_matrix import Layout
from tests.distributed.test_loss_layouts import (
    LAYOUTS,
    joined_gradients,
    largest_difference,
    measure,
    measure_all,
)
from tests.unit.loss.loss_splits import (
    LOSSES,
    NUM_SPLITS,
    largest_differences,
    largest_differences_on_ranks,
)
from torchtitan.loss.aggregation import LOSS_AGGREGATIONS
from torchtitan.testing.gloo import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--splits", type=int, default=NUM_SPLITS)
    parser.add_argument("--ranks", type=int, nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = (torch.float64, torch.float32)
    print(f"{args.splits} splits in one process, largest relative difference of (loss, gradient)")
    for loss in LOSSES:
        for mode in LOSS_AGGREGATIONS:
            found = [largest_differences(mode, dtype, args.splits, loss) for dtype in dtypes]
            texts = [
                "({:.1e}, {:.1e}) in {}".format(*differences, dtype)
                for differences, dtype in zip(found, dtypes, strict=True)
            ]
            print(f"{loss:8}{mode:26}{'  '.join(texts)}")

    print(f"{args.splits} splits over gloo ranks, largest relative difference of the gradient")
    for n in (1, 2, 3, 4):
        found = run_ranks(largest_differences_on_ranks, n, args.splits)[0]
        texts = [
            f"{max(worst for (*_, of), worst in found.items() if of == dtype):.1e} in {dtype}"
            for dtype in dtypes
        ]
        print(f"{n} ranks, any loss and mode: {'  '.join(texts)}")

    print("the engine on gloo ranks, largest relative difference of the gradient")

    folder = tempfile.mkdtemp()
    families = {family for n in args.ranks for _, family in LAYOUTS[n]}
    alone = {family: measure(Layout("1 process"), family, folder) for family in sorted(families)}
    for n in args.ranks:
        ranks = run_ranks(measure_all, n, LAYOUTS[n], folder, timeout_seconds=600)
        for (layout, family), runs in zip(LAYOUTS[n], zip(*ranks, strict=True), strict=True):
            expected = alone[family]["gradients"]
            worst = max(
                largest_difference(joined_gradients(runs, mode), expected[mode])
                for mode in LOSS_AGGREGATIONS
            )
            print(f"{layout.name:40} largest difference in any mode {worst:.1e}")


if __name__ == "__main__":
    main()
