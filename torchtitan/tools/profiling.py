"""The path of `torchtitan.callbacks.profiling` in torchtitan 0.2.x."""

from torchtitan.callbacks.profiling import *  # noqa: F403
