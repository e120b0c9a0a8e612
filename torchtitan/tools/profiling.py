"""Alias of `torchtitan.callbacks.profiling`, at its path in torchtitan 0.2.x."""

from torchtitan.callbacks.profiling import *  # noqa: F403
