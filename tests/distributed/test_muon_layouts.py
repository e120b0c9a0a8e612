"""Muon gives the weights of one process in every layout, and shares the work out."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.layout_matrix import (
    LAYOUTS,
    MOE_LAYOUTS,
    ONE_PROCESS,
    SHALLOW,
    differences,
    measure,
    needs_four_layers,
)
from torchtitan.config.job_config import Muon as MuonOptions
from torchtitan.optim import muon
from torchtitan.testing.gloo import run_ranks

MUON = (
    "--optimizer.name=Muon",
    "--optimizer.muon.ns_dtype=float32",  # a number rounded to bf16 otherwise may jump by 1/256
)
DENSE = [("llama3", "documents, varlen"), ("deepseek_v3", "whole rows")]
EXPERTS = [("deepseek_v3", "whole rows"), ("gpt_oss", "documents, varlen")]
TIED = [("qwen3, tied", "whole rows")]
QUICK = "FSDP 2, EP 2"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(flags, case) -> the run of one process; each is made when it is first needed."""
    runs = {}

    def run_of(flags, cases):
        missing = [case for case in cases if (flags, case) not in runs]
        made = measure(ONE_PROCESS, missing, str(tmp_path_factory.mktemp("one")), flags)
        runs.update({(flags, case): run for case, run in zip(missing, made, strict=True)})
        return [runs[flags, case] for case in cases]

    return run_of


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=() if layout.name == QUICK else pytest.mark.slow)
        for layout in LAYOUTS + MOE_LAYOUTS
    ],
)
def test_muon_gives_the_weights_of_one_process(layout, one_process, tmp_path):
    cases = EXPERTS if layout in MOE_LAYOUTS else DENSE + (TIED if layout.pp > 1 else [])
    flags = MUON if needs_four_layers(layout) else (*MUON, SHALLOW)
    expected_runs = one_process(flags, cases)
    for case, run, expected in zip(
        cases, measure(layout, cases, str(tmp_path), flags), expected_runs, strict=True
    ):
        assert any(key.endswith("momentum_buffer") for key in run.optimizer_state)
        found = differences(run, expected)
        assert found["weights"] <= 1.5e-6, f"{case}: weights differ by {found['weights']:.1e}"
        # Relative to the largest number; gradients differ as in test_layout_matrix.
        assert found["optimizer_state"] <= 1e-5, f"{case}: {found}"
        assert found["loss"] <= 1e-6, f"{case}: {found}"


def steps_of(placements, shape) -> tuple[list[torch.Tensor], int]:
    """Return five matrices after three steps, and how many this rank orthogonalized."""
    generator = torch.Generator().manual_seed(0)
    mesh = shape and torch.distributed.init_device_mesh("cpu", shape)

    def spread(x):
        return distribute_tensor(x, mesh, placements) if placements else x

    matrices = [nn.Parameter(spread(torch.randn(8, 4 + i, generator=generator))) for i in range(5)]
    calls = mock.Mock(wraps=muon.orthogonalize)
    optimizer = muon.Muon(
        [{"params": matrices}],
        matrices=matrices,
        options=MuonOptions(ns_dtype="float32"),
        replicas=mesh,
        **dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    )
    with mock.patch.object(muon, "orthogonalize", calls):
        for _ in range(3):
            for p in matrices:
                p.grad = spread(torch.randn(p.shape, generator=generator))
            optimizer.step()
    whole = [p.full_tensor() if placements else p for p in matrices]
    return [p.detach() for p in whole], calls.call_count


@pytest.mark.parametrize(
    "placements, shape",
    [
        pytest.param([Shard(0), Shard(1)], (2, 2), id="FSDP and TP"),
        pytest.param([Replicate(), Shard(0)], (2, 2), id="HSDP", marks=pytest.mark.slow),
        pytest.param(None, (4,), id="DDP", marks=pytest.mark.slow),
    ],
)
def test_each_matrix_is_orthogonalized_by_one_rank_and_shared(placements, shape):
    expected, calls = steps_of(None, None)
    assert calls == 5 * 3
    ranks = run_ranks(steps_of, 4, placements, shape)
    assert sorted(calls for _, calls in ranks) == [3, 3, 3, 6]
    for weights, _ in ranks:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
