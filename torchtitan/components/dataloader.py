"""The import path in torchtitan 0.2.x of `torchtitan.data.dataloader`."""

from torchtitan.data.dataloader import *  # noqa: F403
