"""The reference's path of `torchtitan.callbacks.profiling`."""

from torchtitan.callbacks.profiling import *  # noqa: F403
