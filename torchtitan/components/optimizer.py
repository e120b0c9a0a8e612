"""The reference's path of `torchtitan.optim.optimizer`."""

from torchtitan.optim.optimizer import *  # noqa: F403
