"""Experts given with a batch are taken in every layout, and again when a block is recomputed."""

import pytest
import torch

from tests.distributed.layout_matrix import (
    BY_NAME,
    ONE_PROCESS,
    REPLAYED,
    Layout,
    assert_same_numbers,
    build_engine,
    differences,
    measure,
    shallow,
)
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.types import SamplingConfig
from torchtitan.testing.gloo import run_ranks

# The first of two layers of deepseek_v3 is dense.
ROWS = [("qwen3 MoE", f"whole rows{REPLAYED}"), ("deepseek_v3", f"documents, varlen{REPLAYED}")]
QUICK = ["FSDP 2, accumulation 2, full AC", "CP 2", "PP 2, 1F1B", "TP 2, EP 2"]
SLOW = ["TP 2, whole logits, op AC", "CP 2, EP 2", "CP 2, PP 2", "FSDP 2, PP 2, EP 2"]
SLOW += ["FSDP 2, TP 2, EP 4", "FSDP 4, EP 4, full AC"]
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]  # two ranks continue different numbers of rows


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
        assert_same_numbers(run, expected, case)
        assert differences(run, own_choice)["gradient"] > 0.01, f"{case}: nothing was replayed"


def generate(layouts: list[Layout], folder: str) -> list[list[tuple[tuple, torch.Tensor]]]:
    """For each layout, the tokens and the sorted experts of each completion."""
    results = []
    for layout in layouts:
        flags = [*layout.overrides(), "--model.attn_type=sdpa"]
        engine = build_engine("deepseek_v3", flags, folder)
        generator = LocalGenerator(engine, records_experts=True)
        drawn = generator.generate(PROMPTS, SamplingConfig(max_tokens=6, seed=3), 2)
        results.append([(c.token_ids, c.routed_experts.sort(dim=-1).values) for c in drawn])
        engine.close()
    return results


@pytest.mark.parametrize(
    "names", [["PP 2, 1F1B", "TP 2"], pytest.param(["FSDP 2, EP 2"], marks=pytest.mark.slow)]
)
def test_generator_records_the_experts_of_one_process_in_every_layout(names, tmp_path):
    (expected,) = generate([ONE_PROCESS], str(tmp_path))
    for layout in run_ranks(generate, 2, [BY_NAME[name] for name in names], str(tmp_path)):
        for found in layout:
            for (tokens, experts), (own_tokens, own_experts) in zip(found, expected, strict=True):
                assert tokens == own_tokens and torch.equal(experts, own_experts)
