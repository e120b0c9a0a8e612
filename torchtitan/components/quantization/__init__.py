"""The reference's path of `torchtitan.quantization`."""
# ruff: noqa: F401

from torchtitan.quantization import (
    FP8_GROUP_ALIGNMENT_SIZE,
    MXFP8_GROUP_ALIGNMENT_SIZE,
    GroupedMMConverter,
    QuantizationConverter,
)
