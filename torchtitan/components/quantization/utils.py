"""The reference's path of `torchtitan.quantization.utils`."""

from torchtitan.quantization.utils import *  # noqa: F403
