"""Lower training steps for an H100, without one.

python -m tests.cuda_lowering.run                    # all cases, one line of JSON each
python -m tests.cuda_lowering.run "llama3 1B flex"
"""

# ruff: noqa: E402 (the device has to be there before torch)

import argparse
import dataclasses
import json

from torchtitan.estimate.device import load_device, patch_cuda

load_device()

from tests.cuda_lowering.cases import CASES
from tests.cuda_lowering.step import add_small_model, lower
from tests.cuda_lowering.target import patch_compiler
from tests.cuda_rehearsal.records import record_of
from torchtitan.estimate.rehearsal import patch_kernels

patch_cuda()
patch_kernels()
add_small_model()
TARGET = patch_compiler()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="default: all cases")
    args = parser.parse_args()
    failed = 0
    for name in args.names or CASES:
        record = record_of(name, lambda name: dataclasses.asdict(lower(name, TARGET)))
        failed += record["error"] is not None
        print(json.dumps(record), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
