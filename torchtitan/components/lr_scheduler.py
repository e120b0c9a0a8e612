"""The import path in torchtitan 0.2.x of `torchtitan.optim.lr_scheduler`."""

from torchtitan.optim.lr_scheduler import *  # noqa: F403
