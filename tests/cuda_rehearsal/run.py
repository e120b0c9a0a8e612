"""Rehearse training on CUDA without CUDA.

python -m tests.cuda_rehearsal.run                  # everything, and where each part waits
python -m tests.cuda_rehearsal.run "llama3 flex"    # this case
"""

# ruff: noqa: E402 (the device has to be there before torch)

import argparse
import time
import traceback

from tests.cuda_rehearsal.device import load_device, patch_cuda

load_device()

from tests.cuda_rehearsal.cases import CASES
from tests.cuda_rehearsal.jobs import rehearse
from tests.cuda_rehearsal.rehearsal import patch_kernels
from tests.cuda_rehearsal.scenarios import SCENARIOS

patch_cuda()
patch_kernels()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    failed = 0
    for name in args.names or [*CASES, *SCENARIOS]:
        started = time.process_time()
        try:
            notes = SCENARIOS[name]() if name in SCENARIOS else {"step": rehearse(name)}
        except Exception:
            failed += 1
            print(f"FAILED  {name}", flush=True)
            traceback.print_exc(limit=-6, chain=False)
            continue
        print(f"ok      {name} ({time.process_time() - started:.1f} s)", flush=True)
        for part, noted in notes.items():
            for what, count in sorted(noted.items()):
                print(f"            {part}: {count} x {what}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
