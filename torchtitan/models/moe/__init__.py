"""Mixture of experts."""

from torchtitan.models.moe.args import MoEArgs, MoEDecoderArgs
from torchtitan.models.moe.moe import (
    FeedForward,
    GroupedExperts,
    MoE,
    TokenChoiceTopKRouter,
    TokenReorderer,
    build_moe,
)

__all__ = [
    "FeedForward",
    "GroupedExperts",
    "MoE",
    "MoEArgs",
    "MoEDecoderArgs",
    "TokenChoiceTopKRouter",
    "TokenReorderer",
    "build_moe",
]
