"""Experts given with a batch are taken in every layout, and again when a block is recomputed."""

import pytest

from tests.distributed.layout_matrix import REPLAYED, differences, measure
from tests.distributed.test_layout_matrix import BY_NAME, ONE_PROCESS, TOLERANCES, shallow

# The first of two layers of deepseek_v3 is dense.
ROWS = [("qwen3 MoE", f"whole rows{REPLAYED}"), ("deepseek_v3", f"documents, varlen{REPLAYED}")]
QUICK = [
    "FSDP 2, accumulation 2, full AC",
    "TP 2, whole logits, op AC",
    "CP 2",
    "PP 2, 1F1B",
    "TP 2, EP 2",
]
SLOW = [
    "CP 2, EP 2",
    "CP 2, PP 2",
    "FSDP 2, PP 2, EP 2",
    "FSDP 2, TP 2, EP 4",
    "FSDP 4, EP 4, full AC",
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    own_choice = [(family, rows.removesuffix(REPLAYED)) for family, rows in ROWS]
    return measure(shallow(ONE_PROCESS), ROWS + own_choice, folder)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_replayed_experts_give_the_numbers_of_one_process(name, one_process, tmp_path):
    runs = measure(shallow(BY_NAME[name]), ROWS, str(tmp_path))
    for case, run, expected, own_choice in zip(
        ROWS, runs, one_process[:2], one_process[2:], strict=True
    ):
        for kind, difference in differences(run, expected).items():
            assert difference <= TOLERANCES[kind], f"{case}: {kind} differs by {difference:.1e}"
        assert differences(run, own_choice)["gradient"] > 0.01, f"{case}: nothing was replayed"
