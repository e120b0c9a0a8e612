"""The reference's import path of `torchtitan.optim.optimizer`."""

from torchtitan.optim.optimizer import *  # noqa: F403
