"""Lower training steps for an H100, without one.

python -m tests.cuda_lowering.run                    # all cases, one line of JSON each
python -m tests.cuda_lowering.run "llama3 1B flex"
"""

# ruff: noqa: E402 (the device has to be there before torch)

import dataclasses
import sys

from torchtitan.estimate.device import load_device, patch_cuda

load_device()

from tests.cuda_lowering.cases import CASES
from tests.cuda_lowering.step import add_small_model, lower
from tests.cuda_lowering.target import patch_compiler
from tests.cuda_rehearsal.records import print_records
from torchtitan.estimate.rehearsal import patch_kernels

patch_cuda()
patch_kernels()
add_small_model()
TARGET = patch_compiler()


if __name__ == "__main__":
    print_records(sys.argv[1:] or CASES, lambda name: dataclasses.asdict(lower(name, TARGET)))
