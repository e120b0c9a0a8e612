"""The reference's path of `torchtitan.listeners.profiling`."""

from torchtitan.listeners.profiling import *  # noqa: F403
