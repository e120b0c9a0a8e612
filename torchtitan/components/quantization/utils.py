"""The reference's import path of `torchtitan.quantization.utils`."""

from torchtitan.quantization.utils import *  # noqa: F403
