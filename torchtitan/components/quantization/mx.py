"""The import path in torchtitan 0.2.x of `torchtitan.quantization.mx`."""

from torchtitan.quantization.mx import *  # noqa: F403
