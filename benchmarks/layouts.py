"""Largest difference that a layout makes to losses and gradient norms.

    python benchmarks/layouts.py [--steps 20]

Trains the debug model in fp32 on the same global batches on 1, 2 and 4 gloo ranks and with
gradient accumulation, and prints, against one process, the hash of the initial weights and
the largest relative difference of loss and gradient norm over all steps.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.training_runs import (
    ACCUMULATION_LAYOUTS,
    DATA_PARALLEL_LAYOUTS,
    ONE_PROCESS,
    TENSOR_PARALLEL_LAYOUTS,
    WHOLE_MODEL,
    max_relative_difference,
    run_layout,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    reference = run_layout(ONE_PROCESS, tempfile.mkdtemp(), args.steps, [WHOLE_MODEL])
    print(f"{'layout':24} {'step-0 weights':18} {'loss':>9} {'grad norm':>9}")
    print(f"{ONE_PROCESS.name:24} {reference['step0_hash']:18} {'-':>9} {'-':>9}")
    for layout in DATA_PARALLEL_LAYOUTS + TENSOR_PARALLEL_LAYOUTS + ACCUMULATION_LAYOUTS:
        run = run_layout(layout, tempfile.mkdtemp(), args.steps, [WHOLE_MODEL])
        differences = [
            max_relative_difference(run[key], reference[key]) for key in ("loss", "grad_norm")
        ]
        print(
            f"{layout.name:24} {run['step0_hash']:18} {differences[0]:9.1e} {differences[1]:9.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
