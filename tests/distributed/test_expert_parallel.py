"""A mixture of experts whose experts are dealt to ranks, against one process."""

import pytest

from tests.distributed.moe_runs import Layout, check_same, train_layouts
from torchtitan.testing.gloo import run_ranks

TWO_RANKS = [
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=2, ep=2, num_microbatches=2, ac_mode="selective"),
    Layout(dp_shard=2, ep=2, ac_mode="full", num_experts=4, use_grouped_mm=False),
    # All tokens choose the first expert: the other rank's get none.
    Layout(dp_shard=2, ep=2, num_experts=4, top_k=1, num_favoured=1),
    Layout(tp=2, ep=2),  # FSDP on one rank; each rank routes half of the tokens
]
FOUR_RANKS = [
    Layout(dp_shard=4, ep=2, ac_mode="full"),  # 3 experts on each of 2 ranks: an uneven split
    Layout(dp_shard=4, ep=2, num_experts=2),  # more ranks than experts: FSDP splits along dim 1
    Layout(dp_shard=2, tp=2, ep=2, etp=2, ac_mode="selective", num_microbatches=2),
]
MORE_OF_FOUR_RANKS = [
    Layout(dp_shard=4, ep=4, num_experts=4),
    Layout(dp_replicate=2, dp_shard=2, ep=2, ac_mode="selective"),
    Layout(dp_shard=2, tp=2, ep=4, num_experts=4, ac_mode="full"),
    Layout(dp_replicate=2, tp=2, ep=2),
]
CASES = [
    pytest.param(TWO_RANKS, id="2 ranks"),
    pytest.param(FOUR_RANKS, id="4 ranks", marks=pytest.mark.slow),
    pytest.param(MORE_OF_FOUR_RANKS, id="more of 4 ranks", marks=pytest.mark.slow),
]


def on_one_process(layout):
    names = ("num_experts", "top_k", "num_favoured")
    return Layout(**{name: getattr(layout, name) for name in names})


@pytest.fixture(scope="module")
def one_process():
    """Return the result of one process, by layout."""
    layouts = TWO_RANKS + FOUR_RANKS + MORE_OF_FOUR_RANKS
    layouts = sorted({on_one_process(layout) for layout in layouts}, key=str)
    (records,) = run_ranks(train_layouts, 1, layouts)
    return dict(zip(layouts, records, strict=True))


@pytest.mark.parametrize("layouts", CASES)
def test_dealt_experts_learn_as_those_of_one_process_do(layouts, one_process):
    for records in run_ranks(train_layouts, layouts[0].world_size, layouts):
        for layout, record in zip(layouts, records, strict=True):
            check_same(record, one_process[on_one_process(layout)], layout)
