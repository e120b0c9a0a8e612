"""The reference's path of `torchtitan.quantization.mx`."""
# ruff: noqa: F401

from torchtitan.quantization.mx import MXGroupedMMConverter, MXLinearConverter
