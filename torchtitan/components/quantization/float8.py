"""The import path in torchtitan 0.2.x of `torchtitan.quantization.float8`."""

from torchtitan.quantization.float8 import *  # noqa: F403
