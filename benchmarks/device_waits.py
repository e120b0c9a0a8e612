"""Where a training step really waits for the device, beside what the rehearsal allows.

    python benchmarks/device_waits.py [--json OUT.json] ["llama3 flex" ...]

The cases of tests/cuda_rehearsal that need one rank are trained on the GPU, and CUDA reports the
waits of the third step. It misses some kinds that the rehearsal sees, see `counting_waits`; a
place that the rehearsal does not know is a fault of one of the two. No kernel is tuned.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
from common import print_header, print_row

from tests.cuda_rehearsal import cases
from tests.gpu.untuned import compile_untuned
from tests.gpu.waits import counting_waits
from tests.reliability.jobs import flags_in

SEQ_LEN = 256


def waits_of(name: str) -> dict[str, int]:
    """By place, in the third step of the case's engine."""
    from torchtitan.config import ConfigManager
    from torchtitan.engine import TrainingEngine

    flags = flags_in(f"""
        model.name={name.split()[0]} model.hf_assets_path=. training.seq_len={SEQ_LEN}
        training.local_batch_size=4 debug.seed=0 job.dump_folder={tempfile.mkdtemp()}
    """)
    config = ConfigManager().parse_args([*flags, *flags_of(name)])
    torch._dynamo.reset()
    with TrainingEngine(config) as engine:
        engine.tokenizer = types.SimpleNamespace(eos_id=0)
        for step in range(3):
            tokens = torch.randint(
                0, 2048, (4, SEQ_LEN), generator=torch.Generator().manual_seed(step)
            )
            with counting_waits() as waits:
                engine.forward_backward_step(
                    input_dict={"input": tokens}, labels=tokens, global_valid_tokens=512
                )
                engine.optim_step()
    return dict(waits)


def flags_of(name: str) -> list[str]:
    """Of the case, with kernels: flex attention of "aot_eager" writes out the scores, and waits."""
    return [flag for flag in cases.CASES[name][1].split() if "compile.backend" not in flag]


def unexpected(name: str, waits: dict[str, int]) -> list[str]:
    """Places among `waits` where the rehearsal allows none."""
    # There: what waits, " in ", and the place.
    allowed = {what.rpartition(" in ")[2] for what in cases.ALLOWED.get(name, {}).get("step", {})}
    return [place for place in waits if place not in allowed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    of_one_rank = [name for name, case in cases.CASES.items() if case[0] == 1]
    parser.add_argument("cases", nargs="*", default=of_one_rank, help="all of one rank by default")
    parser.add_argument("--json", type=Path, help="also write what was seen to this file")
    args = parser.parse_args()
    torch.compile = compile_untuned
    print_header("case", "seconds", "waits of a step", "not allowed")
    seen: list[dict[str, Any]] = []
    for name in args.cases:
        started = time.perf_counter()
        entry: dict[str, Any] = {"case": name, "waits": {}, "unexpected": [], "error": ""}
        try:
            entry["waits"] = waits_of(name)
            entry["unexpected"] = unexpected(name, entry["waits"])
        except Exception as error:  # the other cases have something to tell, too
            entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        seen.append(entry)
        seen_waits = "<br>".join(f"{n} x {place}" for place, n in entry["waits"].items()) or "none"
        new = "<br>".join(entry["unexpected"]) or "none"
        seconds = f"{time.perf_counter() - started:.1f}"
        print_row(name, seconds, entry["error"] or seen_waits, new)
        gc.collect()
        if args.json:
            args.json.write_text(json.dumps(seen, indent=2))
    sys.exit(any(entry["error"] or entry["unexpected"] for entry in seen))


if __name__ == "__main__":
    main()
