"""The reference's import path of `torchtitan.quantization`."""

from torchtitan.quantization import (
    FP8_GROUP_ALIGNMENT_SIZE,
    MXFP8_GROUP_ALIGNMENT_SIZE,
    GroupedMMConverter,
    QuantizationConverter,
)

__all__ = [
    "FP8_GROUP_ALIGNMENT_SIZE",
    "MXFP8_GROUP_ALIGNMENT_SIZE",
    "GroupedMMConverter",
    "QuantizationConverter",
]
