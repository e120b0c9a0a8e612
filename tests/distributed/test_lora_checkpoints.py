"""Checkpoints of adapters: small, without their base, and for every number of ranks."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    SHALLOW,
    Layout,
    build_engine,
    run_step,
    whole,
)
from torchtitan.testing.gloo import run_ranks

FLAGS = [
    "--model.converters=lora",
    "--lora.rank=4",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
]
FSDP_2 = Layout("FSDP 2", dp_shard=2)
PP_2 = Layout("PP 2", pp=2)
FSDP_TP = Layout("FSDP 2, TP 2", dp_shard=2, tp=2)


def train(layout, folder, first, last, *flags):
    """Continue from the newest checkpoint, and save after step `last`; return losses and weights."""
    engine = build_engine("llama3", [*FLAGS, SHALLOW, *layout.overrides(), *flags], folder)
    with engine:
        assert engine.load() == (first > 0)
        assert engine.weights_version == first
        losses = []
        for step in range(first, last):
            losses.append(run_step(engine, layout, step))
            engine.optim_step()
        if last > first:
            engine.save()
        part = engine.model_parts
        weights = {n: whole(p) for x in part for n, p in x.named_parameters() if p.requires_grad}
    return losses, weights


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return train(ONE_PROCESS, str(tmp_path_factory.mktemp("unbroken")), 0, 6)


def test_resumed_run_repeats_the_unbroken_one_bitwise(unbroken, tmp_path):
    losses, _ = train(ONE_PROCESS, str(tmp_path), 0, 3)
    later, weights = train(ONE_PROCESS, str(tmp_path), 3, 6)
    assert losses + later == unbroken[0]
    assert all(torch.equal(weights[name], unbroken[1][name]) for name in unbroken[1])
    saved = FileSystemReader(tmp_path / "checkpoint/step-6").read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith(("layers", "tok", "norm", "out"))} == set(
        weights
    )
    moments = {f"optimizer.state.{name}.{kind}" for name in weights for kind in ("exp_avg", "step")}
    assert moments <= saved.keys()


def continued(steps, folder, unbroken):
    """steps: (layout, last step) of each run, which continues from the run before."""
    losses, first = [], 0
    for layout, last in steps:
        runs = run_ranks(train, layout.world_size, layout, folder, first, last)
        losses += runs[0][0]
        first = last
    # fp32: the order of summation differs between layouts.
    assert losses == pytest.approx(unbroken[0][: len(losses)], rel=1e-6)


def test_saved_by_one_rank_continues_on_two(unbroken, tmp_path):
    continued([(ONE_PROCESS, 2), (FSDP_2, 3), (PP_2, 4)], str(tmp_path), unbroken)


@pytest.mark.slow
def test_saved_by_one_rank_continues_on_two_then_four_then_one(unbroken, tmp_path):
    steps = [(ONE_PROCESS, 1), (FSDP_2, 2), (FSDP_TP, 3), (PP_2, 4), (ONE_PROCESS, 5)]
    continued(steps, str(tmp_path), unbroken)


def test_another_base_is_refused_by_its_digest(tmp_path):
    train(ONE_PROCESS, str(tmp_path), 0, 1)
    with pytest.raises(ValueError, match="trained on another base model") as error:
        train(ONE_PROCESS, str(tmp_path), 1, 2, "--debug.seed=8")
    assert "initial weights" in str(error.value)
