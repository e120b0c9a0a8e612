"""Losses of the RL trainer: pure functions of per-token tensors, always summed by weights."""

from torchtitan.rl.losses.base import LossOutput, PolicyLoss, finalize_metrics
from torchtitan.rl.losses.policy import (
    CISPOLoss,
    CrossEntropyLoss,
    DAPOLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
)
from torchtitan.rl.losses.registry import (
    build_loss,
    loss_class,
    loss_from_config,
    loss_names,
    register_loss,
)

__all__ = [
    "CISPOLoss",
    "CrossEntropyLoss",
    "DAPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "ImportanceSamplingLoss",
    "LossOutput",
    "PolicyLoss",
    "build_loss",
    "finalize_metrics",
    "loss_class",
    "loss_from_config",
    "loss_names",
    "register_loss",
]
