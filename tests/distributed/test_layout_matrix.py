"""Every layout gives the numbers of one process: the half of the matrix that is quick.

`python benchmarks/layout_matrix.py` runs all of it, and docs/measured.md keeps what it found.
"""

import pytest

from tests.distributed.layout_matrix import (
    BY_NAME,
    MOE_FAMILIES,
    ONE_PROCESS,
    assert_same_numbers,
    measure,
    needs_four_layers,
    shallow,
)

DENSE_AND_EXPERTS = [("llama3", "documents, varlen"), ("deepseek_v3", "whole rows")]
EXPERTS = [("qwen3 MoE", "documents, flex")]
# Masks that differ between layers, within documents.
CHUNKS_AND_WINDOWS = [("llama4", "documents, flex"), ("gpt_oss", "documents, varlen")]
# A pipeline has two copies of its embedding.
TIED = [("qwen3, tied", "whole rows")]
BIASES = [("llama3, biases", "documents, flex")]
# Computed one by one; on four ranks FSDP splits them along another dimension.
TWO_EXPERTS = [("qwen3 MoE, two experts", "whole rows")]
# Norms behind, over all heads; windows by layer, and a cap on logits; gates.
AFTER, WINDOWS, GATES = (
    [(family, "documents, varlen")] for family in ("olmo2", "gemma4", "gates and scales")
)
# A recurrent state, reset at documents.
LINEAR, LINEAR_MOE = [("qwen3_5", "documents, varlen")], [("qwen3_5 MoE", "documents, flex")]
# layout -> (family, rows)
QUICK = {
    "DDP 2": DENSE_AND_EXPERTS + TIED,
    "FSDP 2, accumulation 2, full AC": DENSE_AND_EXPERTS + CHUNKS_AND_WINDOWS[:1] + TIED + LINEAR,
    "TP 2, whole logits, op AC": DENSE_AND_EXPERTS + CHUNKS_AND_WINDOWS,
    "TP 2": BIASES + TIED + EXPERTS + AFTER + GATES + LINEAR,
    "CP 2": DENSE_AND_EXPERTS + CHUNKS_AND_WINDOWS + WINDOWS + LINEAR,
    "CP 2, alltoall, full AC": CHUNKS_AND_WINDOWS[:1] + LINEAR,
    "PP 2, GPipe, accumulation 2": DENSE_AND_EXPERTS + WINDOWS + LINEAR,
    "PP 2, ZBVZeroBubble": DENSE_AND_EXPERTS + TIED,
    "FSDP 2, TP 2": DENSE_AND_EXPERTS[:1],
    "TP 2, CP 2": DENSE_AND_EXPERTS[:1],
    "FSDP 2, PP 2": TIED,
    "CP 2, PP 2": CHUNKS_AND_WINDOWS[:1],
    "FSDP 2, EP 2": TWO_EXPERTS + LINEAR_MOE,
    "TP 2, EP 2": CHUNKS_AND_WINDOWS[1:],
    "CP 2, EP 2": EXPERTS,
    "FSDP 2, PP 2, EP 2": EXPERTS,
}
SLOW = {
    "FSDP 2, TP 2, EP 2, ETP 2": EXPERTS,
    "FSDP 4, EP 2": TWO_EXPERTS,
    "HSDP 2x2, EP 2": EXPERTS + LINEAR_MOE,
    "TP 2, PP 2, CP 2, EP 2": LINEAR_MOE,
    "FSDP 2, accumulation 2, full AC": AFTER + WINDOWS + GATES,
    "TP 2, whole logits, op AC": AFTER + WINDOWS + GATES,
    "CP 2, alltoall, full AC": AFTER + WINDOWS + GATES,
    "FSDP 2, PP 2": AFTER + WINDOWS + GATES,
    "FSDP 2, TP 2": AFTER + WINDOWS + GATES + LINEAR,
    "TP 2, CP 2": AFTER + WINDOWS + GATES + LINEAR,
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Case -> its run."""
    cases = DENSE_AND_EXPERTS + TIED
    runs = measure(ONE_PROCESS, cases, str(tmp_path_factory.mktemp("one")))
    return dict(zip(cases, runs, strict=True))


@pytest.fixture(scope="module")
def shallow_one_process(tmp_path_factory):
    cases = DENSE_AND_EXPERTS + EXPERTS + CHUNKS_AND_WINDOWS + TIED + BIASES + TWO_EXPERTS
    cases += AFTER + WINDOWS + GATES + LINEAR + LINEAR_MOE
    runs = measure(shallow(ONE_PROCESS), cases, str(tmp_path_factory.mktemp("one")))
    return dict(zip(cases, runs, strict=True))


def test_every_family_learns_and_its_experts_are_balanced(shallow_one_process):
    for (family, _), run in shallow_one_process.items():
        assert run.losses[-1] < run.losses[0], family
        assert bool(run.expert_bias) == (family in MOE_FAMILIES), family
        assert not run.expert_bias or any(x.any() for x in run.expert_bias.values()), family


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *(pytest.param(name, cases, id=name) for name, cases in QUICK.items()),
        *(
            pytest.param(name, cases, id=f"{name}, slow", marks=pytest.mark.slow)
            for name, cases in SLOW.items()
        ),
    ],
)
def test_layout_gives_the_numbers_of_one_process(
    name, cases, one_process, shallow_one_process, tmp_path
):
    layout, expected_runs = BY_NAME[name], one_process
    if not needs_four_layers(layout):
        layout, expected_runs = shallow(layout), shallow_one_process
    for case, run in zip(cases, measure(layout, cases, str(tmp_path)), strict=True):
        assert_same_numbers(run, expected_runs[case], case)
