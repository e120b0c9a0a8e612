"""The import path in torchtitan 0.2.x of `torchtitan.quantization.utils`."""

from torchtitan.quantization.utils import *  # noqa: F403
