"""Whole RL runs on this process or on gloo ranks, for tests."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.unit.rl.toy import toy_config
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.rl.controller import Controller, build_part
from torchtitan.rl.weight_sync import OurNames

# Layouts of two ranks.
LAYOUTS = {
    "FSDP": ["--parallelism.data_parallel_shard_degree=2"],
    "DDP": ["--parallelism.data_parallel_replicate_degree=2"],
    "TP": ["--parallelism.tensor_parallel_degree=2"],
    "PP": ["--parallelism.pipeline_parallel_degree=2"],
    "CP": ["--parallelism.context_parallel_degree=2"],
}


def weights_hash(controller: Controller) -> str:
    """Return a digest of all weights of all pipeline stages. Collective."""
    weights = WeightStream.from_engine(controller.trainer.engine, OurNames())
    assert all(tensor is not None for _, tensor in weights)  # reads all of them
    return weights.digest


def run_on_this_rank(
    dump_folder: Path, overrides: list[str], kill_after: int | None = None
) -> dict[str, Any] | None:
    """Train to the end, or kill this process after a step; returns the log of every step and evaluation.

    Returns None on a rank that only generates.
    """
    part = build_part(toy_config(dump_folder, *overrides))
    if not isinstance(part, Controller):
        part.train()
        part.close()
        return None
    steps: list[dict[str, float]] = []
    evaluations: list[tuple] = []
    train_step, evaluation = part.train_step, part.reporter.evaluation

    def recorded_step() -> dict[str, float]:
        steps.append({"step": part.step + 1, **train_step()})
        if part.step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return steps[-1]

    part.train_step = recorded_step
    part.reporter.evaluation = lambda *values: (evaluations.append(values), evaluation(*values))
    part.train()
    digest = weights_hash(part)
    part.close()
    return {"steps": steps, "evaluations": evaluations, "digest": digest}


def numbers(run: dict[str, Any]) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, reward) of each step."""
    return [(step["loss"], step["grad_norm"], step["rl/reward"]) for step in run["steps"]]
