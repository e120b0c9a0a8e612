"""The reference's import path of `torchtitan.optim.lr_scheduler`."""

from torchtitan.optim.lr_scheduler import *  # noqa: F403
