"""The import path in torchtitan 0.2.x of `torchtitan.optim.optimizer`."""

from torchtitan.optim.optimizer import *  # noqa: F403
