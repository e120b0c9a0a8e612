"""Muon and parameter groups give the numbers of one process in every layout, and resume in others."""

import pytest

from tests.distributed.layout_matrix import (
    LAYOUTS,
    MOE_LAYOUTS,
    ONE_PROCESS,
    SHALLOW,
    differences,
    measure,
)
from tests.distributed.test_layout_matrix import needs_four_layers

MUON = (
    "--optimizer.name=Muon",
    "--optimizer.muon.ns_dtype=float32",  # a number rounded to bf16 otherwise may jump by 1/256
    "--optimizer.lr=3e-3",
)
DENSE = [("llama3", "documents, varlen"), ("deepseek_v3", "whole rows")]
# Experts in stacks of three and of two dimensions' worth of biases, and a tied embedding.
EXPERTS = [("deepseek_v3", "whole rows"), ("gpt_oss", "documents, varlen")]
TIED = [("qwen3, tied", "whole rows")]
QUICK = {"FSDP 2": DENSE, "FSDP 2, EP 2": EXPERTS}


def cases_of(layout):
    if layout in MOE_LAYOUTS:
        return EXPERTS
    return DENSE + TIED if layout.pp > 1 else DENSE


def flags_of(layout):
    return MUON if needs_four_layers(layout) else (*MUON, SHALLOW)


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
        pytest.param(layout, id=layout.name, marks=() if layout.name in QUICK else pytest.mark.slow)
        for layout in LAYOUTS + MOE_LAYOUTS
    ],
)
def test_muon_gives_the_weights_of_one_process(layout, one_process, tmp_path):
    cases, flags = cases_of(layout), flags_of(layout)
    expected_runs = one_process(flags, cases)
    for case, run, expected in zip(
        cases, measure(layout, cases, str(tmp_path), flags), expected_runs, strict=True
    ):
        assert any(key.endswith("momentum_buffer") for key in run.optimizer_state)
        found = differences(run, expected)
        assert found["weights"] <= 1e-6, f"{case}: weights differ by {found['weights']:.1e}"
        # Relative to the largest number; gradients differ as in test_layout_matrix.
        assert found["optimizer_state"] <= 1e-5, f"{case}: {found}"
        assert found["loss"] <= 1e-6, f"{case}: {found}"
