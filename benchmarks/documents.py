"""Largest difference of the losses of flex, varlen and a dense mask, training on packed text.

    python benchmarks/documents.py [--steps 20] [--dataset python_docs]

The debug model in fp32, documents kept apart by the end-of-text token. The dense mask is
written out from the tokens and goes through torch's scaled dot product attention.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.unit.batch.document_runs import KERNELS, largest_difference, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dataset", default="python_docs")
    parser.add_argument("--seq-len", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    overrides = [f"--training.dataset={args.dataset}", f"--training.seq_len={args.seq_len}"]
    runs = {k: train(tempfile.mkdtemp(), k, args.steps, *overrides) for k in KERNELS}
    reference, n_ends = runs["dense"]
    print(f"{args.steps} steps on {args.dataset}, {n_ends} documents end in the text read")
    for kernel, (losses, _) in runs.items():
        print(
            f"{kernel:7} loss {losses[0]:.6f} -> {losses[-1]:.6f}, largest difference to the "
            f"dense mask {largest_difference(losses, reference):.1e}"
        )


if __name__ == "__main__":
    main()
