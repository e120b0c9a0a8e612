"""The reference's path of `torchtitan.loss`."""
# ruff: noqa: F401

from torchtitan.loss.aggregation import (
    LOSS_AGGREGATIONS,
    aggregation_weights,
    weighted_cross_entropy,
    weighted_policy_loss,
    weighted_sum,
    weighted_value_loss,
)
from torchtitan.loss.cross_entropy import (
    IGNORE_INDEX,
    LossFunction,
    build_cross_entropy_loss,
    build_mse_loss,
    cross_entropy_loss,
    default_head,
    mse_loss,
)
