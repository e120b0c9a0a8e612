"""The reference's path of `torchtitan.quantization`."""

from torchtitan.quantization import *  # noqa: F403
