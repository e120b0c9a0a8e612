"""Every layout gives the numbers of one process: the half of the matrix that is quick.

`python benchmarks/layout_matrix.py` runs all of it, and docs/layouts.md keeps what it found.
"""

import pytest

from tests.distributed.layout_matrix import (
    LAYOUTS,
    MOE_LAYOUTS,
    ONE_PROCESS,
    differences,
    measure,
)

# fp32: the order of summation differs between layouts. Losses and norms are sums of many terms.
TOLERANCES = {
    "loss": 1e-6,
    "grad_norm": 1e-6,
    "gradient": 1e-5,
    "weights": 1e-5,
    "optimizer_state": 1e-5,
    "expert_bias": 0.0,
}
DENSE_AND_EXPERTS = [("llama3", "documents, varlen"), ("deepseek_v3", "whole rows")]
EXPERTS = [("qwen3 MoE", "documents, flex")]
QUICK = {
    "DDP 2",
    "FSDP 2, accumulation 2, full AC",
    "TP 2, whole logits, op AC",
    "CP 2",
    "CP 2, alltoall, full AC",
    "PP 2, GPipe, accumulation 2",
    "PP 2, ZBVZeroBubble",
    "FSDP 2, TP 2",
    "TP 2, CP 2",
    "TP 2, PP 2, Interleaved1F1B",
    "CP 2, PP 2",
    "CP 2, EP 2",
    "FSDP 2, TP 2, EP 4",
    "FSDP 2, PP 2, EP 2",
}
QUICK_LAYOUTS = [layout for layout in LAYOUTS if layout.name in QUICK]
QUICK_MOE_LAYOUTS = [layout for layout in MOE_LAYOUTS if layout.name in QUICK]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    cases = DENSE_AND_EXPERTS + EXPERTS
    runs = measure(ONE_PROCESS, cases, str(tmp_path_factory.mktemp("one")))
    return dict(zip(cases, runs, strict=True))


def check(layout, cases, one_process, folder):
    for case, run in zip(cases, measure(layout, cases, folder), strict=True):
        expected = one_process[case]
        assert run.hashes == expected.hashes, f"{case}: initial weights differ"
        for kind, difference in differences(run, expected).items():
            assert difference <= TOLERANCES[kind], f"{case}: {kind} differs by {difference:.1e}"


def test_every_quick_layout_is_in_the_matrix():
    assert len(QUICK_LAYOUTS) + len(QUICK_MOE_LAYOUTS) == len(QUICK)


@pytest.mark.parametrize("layout", QUICK_LAYOUTS, ids=lambda layout: layout.name)
def test_layout_gives_the_numbers_of_one_process(layout, one_process, tmp_path):
    check(layout, DENSE_AND_EXPERTS, one_process, str(tmp_path))


@pytest.mark.parametrize("layout", QUICK_MOE_LAYOUTS, ids=lambda layout: layout.name)
def test_experts_on_ranks_give_the_numbers_of_one_process(layout, one_process, tmp_path):
    check(layout, EXPERTS, one_process, str(tmp_path))
