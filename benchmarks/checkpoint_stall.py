"""How long a step waits for its checkpoint: asynchronous saves against synchronous ones.

    python benchmarks/checkpoint_stall.py [--saves 4] [--steps-per-save 100] [--folder DISK]

A Llama of 100M parameters (fp32, AdamW: 1.2 GB per checkpoint) saves in turn asynchronously and
synchronously, the first time asynchronously, in a process that has saved nothing before. Printed
are the stall of each save; its ratio to the median synchronous one, for the first asynchronous
save and for all; the rate of SHA-256 by itself; and the share of the wall time that asynchronous
saves would take at one per `steps-per-save` steps of this machine.
"""

import argparse
import dataclasses
import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.checkpoint.saver import AsyncMode
from torchtitan.checkpoint.states import live_states
from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger

SEQ_LEN = 32
STEPS_BETWEEN = 3


def build(folder: str) -> TrainingEngine:
    spec = get_train_spec("llama3")
    args = dataclasses.replace(
        spec.model_args["debugmodel"], dim=768, n_layers=12, n_heads=12, vocab_size=9_500
    )
    register_train_spec(
        "llama3", dataclasses.replace(spec, model_args=spec.model_args | {"100M": args})
    )
    return TrainingEngine(
        ConfigManager().parse_args(
            [
                "--model.name=llama3",
                "--model.flavor=100M",
                f"--training.seq_len={SEQ_LEN}",
                "--training.mixed_precision_param=float32",
                "--activation_checkpoint.mode=none",
                "--debug.seed=0",
                f"--job.dump_folder={folder}",
                "--checkpoint.enable",
                "--checkpoint.keep_latest_k=2",
                "--checkpoint.async_mode=async",
            ]
        )
    )


def train(engine: TrainingEngine, n_steps: int) -> list[float]:
    seconds = []
    for _ in range(n_steps):
        started = time.perf_counter()
        tokens = torch.randint(0, 2000, (1, SEQ_LEN))
        engine.forward_backward_step(
            input_dict={"input": tokens}, labels=tokens, global_valid_tokens=SEQ_LEN
        )
        engine.optim_step()
        engine.step += 1
        seconds.append(time.perf_counter() - started)
    return seconds


def stall_of_save(engine: TrainingEngine, mode: AsyncMode) -> float:
    manager = engine.checkpointer
    manager._saver.wait(manager.folder)  # a save before this one is another's time
    manager.async_mode = mode
    started = time.perf_counter()
    engine.save()
    return time.perf_counter() - started


def hash_rate() -> float:
    """GB/s of one core."""
    data = os.urandom(2**28)
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    return len(data) / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--saves", type=int, default=4, help="of each kind")
    parser.add_argument("--steps-per-save", type=int, default=100)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    init_logger()

    stalls: dict[AsyncMode, list[float]] = {AsyncMode.ASYNC: [], AsyncMode.DISABLED: []}
    steps, steps_beside_a_save = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, build(folder) as engine:
        engine.checkpointer.claim_folder()
        train(engine, 1)
        checkpointer = engine.checkpointer
        # As `save` does in a step that is not due.
        checkpointer._saver.prepare_copies(lambda: live_states(checkpointer.states))
        for _ in range(options.saves):
            for mode in stalls:
                steps += train(engine, STEPS_BETWEEN)
                stalls[mode].append(stall_of_save(engine, mode))
                if mode == AsyncMode.ASYNC:
                    steps_beside_a_save += train(engine, STEPS_BETWEEN)
        n_params = engine.num_params

    sync, step = statistics.median(stalls[AsyncMode.DISABLED]), statistics.median(steps)
    stall = statistics.median(stalls[AsyncMode.ASYNC])
    period = options.steps_per_save * step + stall
    print(f"{n_params / 1e6:.0f}M parameters, load {os.getloadavg()[0]:.1f}")
    for mode, seconds in stalls.items():
        print(f"stall of a save, {mode.value:8} (s): {', '.join(f'{s:.2f}' for s in seconds)}")
    print(f"first asynchronous / synchronous: {stalls[AsyncMode.ASYNC][0] / sync:.3f}")
    print(f"median asynchronous / synchronous: {stall / sync:.3f}")
    print(f"a step: {step:.3f} s; beside a save {statistics.median(steps_beside_a_save):.3f} s")
    print(f"SHA-256: {hash_rate():.2f} GB/s on one core")
    print(
        f"stalls at one save per {options.steps_per_save} steps: {stall / period:.2%} of the time"
    )


if __name__ == "__main__":
    main()
