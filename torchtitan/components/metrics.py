"""The import path in torchtitan 0.2.x of `torchtitan.callbacks.metrics`."""

from torchtitan.callbacks.metrics import *  # noqa: F403
