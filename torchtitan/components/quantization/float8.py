"""The reference's path of `torchtitan.quantization.float8`."""
# ruff: noqa: F401

from torchtitan.quantization.float8 import (
    AUTO_FILTER_SMALL_KN_FLAG,
    Float8GroupedMMConverter,
    Float8LinearConverter,
)
