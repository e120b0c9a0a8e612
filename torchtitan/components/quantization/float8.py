"""The reference's import path of `torchtitan.quantization.float8`."""

from torchtitan.quantization.float8 import *  # noqa: F403
