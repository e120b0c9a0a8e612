"""The reference's path of `torchtitan.loss.cross_entropy`."""
# ruff: noqa: F401

from torchtitan.loss.cross_entropy import (
    IGNORE_INDEX,
    LOSS_AGGREGATIONS,
    LossFunction,
    aggregation_weights,
    build_cross_entropy_loss,
    build_mse_loss,
    cross_entropy_loss,
    mse_loss,
    weighted_cross_entropy,
    weighted_policy_loss,
    weighted_sum,
    weighted_value_loss,
)
