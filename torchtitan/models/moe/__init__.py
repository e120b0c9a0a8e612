"""Mixture of experts."""

from typing import TYPE_CHECKING

from torchtitan.models.moe.args import MoEArgs, MoEDecoderArgs
from torchtitan.tools.lazy_names import load_on_access

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

# Flavor tables need the args only.
_LAYERS = [name for name in __all__ if name not in ("MoEArgs", "MoEDecoderArgs")]
__getattr__ = load_on_access(__name__, dict.fromkeys(_LAYERS, ".moe"))
