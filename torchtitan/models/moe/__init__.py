"""Mixture of experts."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from torchtitan.models.moe.args import MoEArgs, MoEDecoderArgs
from torchtitan.models.moe.moe import (
    FeedForward,
    GroupedExperts,
    MoE,
    TokenChoiceTopKRouter,
    TokenReorderer,
    build_moe,
)
