"""Rehearse training on CUDA without CUDA.

python -m tests.cuda_rehearsal.run                  # everything, and where each part waits
python -m tests.cuda_rehearsal.run "llama3 flex"    # this case
"""

# ruff: noqa: E402 (the device has to be there before torch)

import argparse
import json

from torchtitan.estimate.device import load_device, patch_cuda

load_device()

from tests.cuda_rehearsal.cases import CASES
from tests.cuda_rehearsal.jobs import make_models_shallow, rehearse
from tests.cuda_rehearsal.records import record_of
from tests.cuda_rehearsal.scenarios import SCENARIOS
from torchtitan.estimate.rehearsal import patch_kernels

patch_cuda()
patch_kernels()
make_models_shallow()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each")
    args = parser.parse_args()
    table = {**dict.fromkeys(CASES, rehearse), **SCENARIOS}
    failed = 0
    for name in args.names or table:
        record = record_of(name, lambda name: {"notes": table[name](name)})
        failed += record["error"] is not None
        print(json.dumps(record) if args.json else in_words(record), flush=True)
    raise SystemExit(failed)


def in_words(record: dict) -> str:
    outcome = "FAILED" if record["error"] else "ok"
    lines = [f"{outcome:7} {record['name']} ({record['cpu_seconds']} s)"]
    for part, noted in record.get("notes", {}).items():
        lines += [f"            {part}: {n} x {what}" for what, n in sorted(noted.items())]
    return "\n".join([*lines, *([record["error"]] if record["error"] else [])])


if __name__ == "__main__":
    main()
