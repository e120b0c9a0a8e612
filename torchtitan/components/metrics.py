"""The reference's import path of `torchtitan.listeners.metrics`."""

from torchtitan.listeners.metrics import *  # noqa: F403
