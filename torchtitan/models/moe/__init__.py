"""Mixture of experts."""

import importlib
from typing import TYPE_CHECKING, Any

from torchtitan.models.moe.args import MoEArgs, MoEDecoderArgs

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # Flavor tables need the args only.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torchtitan.models.moe.moe"), name)
