"""The reference's path of `torchtitan.quantization.mx`."""

from torchtitan.quantization.mx import *  # noqa: F403
