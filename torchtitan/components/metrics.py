"""The reference's path of `torchtitan.listeners.metrics`."""

from torchtitan.listeners.metrics import *  # noqa: F403
