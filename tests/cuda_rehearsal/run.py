"""Rehearse training steps on CUDA without CUDA.

python -m tests.cuda_rehearsal.run                  # all cases, and where each waits
python -m tests.cuda_rehearsal.run "llama3 flex"    # this one
"""

# ruff: noqa: E402 (the device has to be there before torch)

import argparse
import contextlib
import os
import tempfile
import time
import traceback
import types
from functools import partial
from unittest import mock

from tests.cuda_rehearsal.device import load_device, patch_cuda

load_device()

import torch

from tests.cuda_rehearsal.cases import CASES
from tests.cuda_rehearsal.rehearsal import Rehearsal, patch_kernels

patch_cuda()
patch_kernels()


@contextlib.contextmanager
def ranks(world_size: int, rank: int = 0):
    """A process group of `world_size` in which nobody answers; this process is one of its ranks."""
    group = partial(torch.distributed.init_process_group, "fake", rank=rank, world_size=world_size)
    environment = mock.patch.dict(os.environ, NGPU=str(world_size), LOCAL_RANK="0")
    torch._dynamo.reset()  # another model's sizes would make this one's dynamic
    with environment, mock.patch("torchtitan.distributed.utils.init_fake_mode", lambda *_: group()):
        yield


def config_of(*flags: str):
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(
        [
            "--training.seq_len=256",
            "--training.local_batch_size=4",
            "--comm.mode=fake_backend",
            "--debug.seed=0",
            "--model.hf_assets_path=.",
            f"--job.dump_folder={tempfile.mkdtemp()}",
            *flags,
        ]
    )


def rehearse(name: str, n_steps: int = 2) -> Rehearsal:
    """Build the engine of a case and train; returns what was noted in the last step."""
    from torchtitan.engine import TrainingEngine

    world_size, flags, rank = (*CASES[name], 0)[:3]
    config = config_of(f"--model.name={name.split()[0]}", *flags.split())
    with ranks(world_size, rank), Rehearsal() as rehearsal, TrainingEngine(config) as engine:
        engine.tokenizer = types.SimpleNamespace(eos_id=0)
        tokens = torch.zeros(4, 256, dtype=torch.int64)
        for _ in range(n_steps):
            rehearsal.forget()
            loss = engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=512
            )
            result = engine.optim_step()
        assert loss.device == result.grad_norm.device == torch.device("cuda", 0)
        return rehearsal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    failed = 0
    for name in args.names or CASES:
        started = time.process_time()
        try:
            noted = rehearse(name)
        except Exception:
            failed += 1
            print(f"FAILED  {name}", flush=True)
            traceback.print_exc()
            continue
        print(f"ok      {name} ({time.process_time() - started:.1f} s)", flush=True)
        for what, count in [*noted.waits.most_common(), *noted.races.most_common()]:
            print(f"            {count} x {what}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
