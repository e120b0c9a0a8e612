"""Mixture of experts."""
# ruff: noqa: F401 (names of the reference)

from torchtitan.models.moe.args import MoEArgs, MoEDecoderArgs
from torchtitan.models.moe.moe import (
    FeedForward,
    GroupedExperts,
    MoE,
    TokenChoiceTopKRouter,
    TokenReorderer,
    build_moe,
)
