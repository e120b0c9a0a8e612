"""The import path in torchtitan 0.2.x of `torchtitan.quantization`."""

from torchtitan.quantization import *  # noqa: F403
