"""The import path in torchtitan 0.2.x of `torchtitan.callbacks.validate`."""

from torchtitan.callbacks.validate import *  # noqa: F403
