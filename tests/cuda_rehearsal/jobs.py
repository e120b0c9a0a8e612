"""Configs and process groups of the jobs that are rehearsed, and the step of an engine."""

import contextlib
import os
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests.cuda_rehearsal.cases import CASES
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.estimate.rehearsal import rehearsing

# A case's time goes with its layers: as many of the debug models as show each kind of layer.
LAYERS = {"llama3": 2, "deepseek_v3": 3, "llama4": 2, "gpt_oss": 2}


def make_models_shallow() -> None:
    """For the whole process."""
    from torchtitan.protocols.train_spec import get_train_spec

    for name, n_layers in LAYERS.items():
        get_train_spec(name).model_args["debugmodel"].n_layers = n_layers


@contextlib.contextmanager
def ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group in which nobody answers; this process is one of its ranks.

    A single rank has gloo, too, for what checkpoints say to each other on the host.
    """
    group = partial(
        torch.distributed.init_process_group,
        "cpu:gloo,cuda:fake" if world_size == 1 else "fake",
        store=torch.distributed.HashStore() if world_size == 1 else None,
        rank=rank,
        world_size=world_size,
    )
    environment = mock.patch.dict(os.environ, NGPU=str(world_size), LOCAL_RANK="0")
    torch._dynamo.reset()  # another model's sizes would make this one's dynamic
    with (
        environment,
        mock.patch(
            "torchtitan.distributed.processes.process_group.init_fake_mode", lambda *_: group()
        ),
    ):
        yield


def common_flags() -> list[str]:
    folder = tempfile.mkdtemp()
    return ["--comm.mode=fake_backend", "--debug.seed=0", f"--job.dump_folder={folder}"]


def config_of(*flags: str):
    from torchtitan.config import ConfigManager

    sizes = "--training.seq_len=256", "--training.local_batch_size=4", "--model.hf_assets_path=."
    return ConfigManager().parse_args([*common_flags(), *sizes, *flags])


@contextlib.contextmanager
def _initialising_each_shape_once() -> Iterator[None]:
    """Initial values take a third of a case's time, and are made alike in all layers."""
    seen, fill = set(), seeded_init.fill

    def fill_if_new(self: seeded_init, tensor: torch.Tensor, transform: Any) -> bool:
        kind = type(tensor), tensor.shape, tensor.dtype
        is_new = kind not in seen
        seen.add(kind)
        return fill(self, tensor, transform) if is_new else True

    with mock.patch.object(seeded_init, "fill", fill_if_new):
        yield


@contextlib.contextmanager
def engine_of(world_size: int, *flags: str, rank: int = 0) -> Iterator[tuple]:
    """(engine, the rehearsal that it runs in)."""
    from torchtitan.engine import TrainingEngine

    config = config_of(*flags)
    with (
        ranks(world_size, rank),
        _initialising_each_shape_once(),
        rehearsing() as rehearsal,
        TrainingEngine(config) as engine,
    ):
        engine.tokenizer = types.SimpleNamespace(eos_id=0)
        yield engine, rehearsal


def rehearse(name: str, n_steps: int = 2) -> dict[str, dict[str, int]]:
    """Build the engine of a case and train; returns what was noted in the last step."""
    world_size, flags, rank = (*CASES[name], 0)[:3]
    flags = f"--model.name={name.split()[0]}", *flags.split()
    tokens = torch.zeros(4, 256, dtype=torch.int64)
    with engine_of(world_size, *flags, rank=rank) as (engine, rehearsal):
        for _ in range(n_steps):
            rehearsal.forget()
            loss = engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=512
            )
            result = engine.optim_step()
        assert loss.device == result.grad_norm.device == torch.device("cuda", 0)
        return {"step": dict(rehearsal.waits + rehearsal.races)}
