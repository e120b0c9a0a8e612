"""Rehearse training on CUDA without CUDA.

python -m tests.cuda_rehearsal.run                  # everything, a line of JSON each: where parts wait
python -m tests.cuda_rehearsal.run "llama3 flex"    # this case
"""

# ruff: noqa: E402 (the device has to be there before torch)

import sys

from torchtitan.estimate.device import load_device, patch_cuda

load_device()

from tests.cuda_rehearsal.cases import CASES
from tests.cuda_rehearsal.jobs import make_models_shallow, rehearse
from tests.cuda_rehearsal.records import print_records
from tests.cuda_rehearsal.scenarios import SCENARIOS
from torchtitan.estimate.rehearsal import patch_kernels

patch_cuda()
patch_kernels()
make_models_shallow()


if __name__ == "__main__":
    table = {**dict.fromkeys(CASES, rehearse), **SCENARIOS}
    print_records(sys.argv[1:] or table, lambda name: {"notes": table[name](name)})
