"""The reference's import path of `torchtitan.data.dataloader`."""

from torchtitan.data.dataloader import *  # noqa: F403
