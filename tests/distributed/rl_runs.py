"""Whole RL runs on this process or on gloo ranks, for tests."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan.rl
from tests.unit.rl.toy import toy_config
from torchtitan.config import ConfigManager
from torchtitan.rl.controller import Controller, build_part
from torchtitan.rl.job_config import JobConfig
from torchtitan.testing.gloo import RankFailure

# Layouts of two ranks.
LAYOUTS = {
    "FSDP": ["--parallelism.data_parallel_shard_degree=2"],
    "DDP": ["--parallelism.data_parallel_replicate_degree=2"],
    "TP": ["--parallelism.tensor_parallel_degree=2"],
    "PP": ["--parallelism.pipeline_parallel_degree=2"],
    "CP": ["--parallelism.context_parallel_degree=2"],
}

CONFIGS = Path(torchtitan.rl.__file__).parent / "train_configs"


def weights_hash(controller: Controller) -> str:
    """Return a hash of all weights of all pipeline stages. Collective."""
    parts: dict[str, str] = {}
    for part in controller.trainer.engine.model_parts:
        for name, p in part.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
            data = whole.detach().contiguous().view(torch.uint8).numpy().tobytes()
            parts[name] = hashlib.sha256(data).hexdigest()
    if torch.distributed.is_initialized():
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, parts)
        parts = {name: digest for part in every for name, digest in part.items()}
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()


def run_on_this_rank(
    dump_folder: Path,
    overrides: list[str],
    kill_after: int | None = None,
    preset: str | None = None,
) -> dict[str, Any] | None:
    """Train to the end, or kill this process after a step; returns the log of every step and evaluation.

    Returns None on a rank that only generates. preset: a config of `torchtitan/rl/train_configs`; None is
    the toy's.
    """
    if preset is None:
        config = toy_config(dump_folder, *overrides)
    else:
        flags = [f"--job.config_file={CONFIGS / preset}.toml", f"--job.dump_folder={dump_folder}"]
        config = ConfigManager(JobConfig).parse_args([*flags, *overrides])
    part = build_part(config)
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


def check_that_killed_run_goes_on(run: Callable[..., list[Any]], folder: Path, steps: list[int]):
    """A run that was killed and continued, in `steps`, has the bits of one that was not.

    run: called with a folder and, for a run that is killed, kill=True; returns the ranks' records.
    """
    unbroken = run(folder / "unbroken")[0]
    with pytest.raises(RankFailure, match="ended without a word"):
        run(folder / "killed", kill=True)
    resumed = run(folder / "killed")[0]
    assert [step["step"] for step in resumed["steps"]] == steps
    assert numbers(resumed) == numbers(unbroken)[-len(steps) :]
    for step, expected in zip(resumed["steps"], unbroken["steps"][-len(steps) :], strict=True):
        critics = [name for name in step if name.startswith("critic/")]
        assert [step[name] for name in critics] == [expected[name] for name in critics]
    assert resumed["digest"] == unbroken["digest"]


def numbers(run: dict[str, Any]) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, reward) of each step."""
    return [(step["loss"], step["grad_norm"], step["rl/reward"]) for step in run["steps"]]
