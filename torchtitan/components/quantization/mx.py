"""The reference's import path of `torchtitan.quantization.mx`."""

from torchtitan.quantization.mx import *  # noqa: F403
