"""The reference's import path of `torchtitan.quantization`."""

from torchtitan.quantization import *  # noqa: F403
