"""The reference's path of `torchtitan.data`."""

from torchtitan.data import *  # noqa: F403
