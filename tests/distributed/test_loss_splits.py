"""Random splits of a step over gloo ranks: the gradient is that of each aggregation's text."""

import pytest
import torch

from tests.unit.loss.loss_splits import LOSSES, largest_differences_on_ranks
from torchtitan.loss.aggregation import LOSS_AGGREGATIONS
from torchtitan.testing.gloo import run_ranks

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_gradient_is_the_same_for_every_split_over_ranks(world_size):
    # benchmarks/aggregation.py tries NUM_SPLITS, three times as many.
    for found in run_ranks(largest_differences_on_ranks, world_size, 20):
        assert len(found) == len(LOSSES) * len(LOSS_AGGREGATIONS) * len(TOLERANCES)
        for (loss, mode, dtype), difference in found.items():
            assert difference < TOLERANCES[dtype], f"{loss}, {mode}, {dtype}"
