"""The reference's import path of `torchtitan.listeners.validate`."""

from torchtitan.listeners.validate import *  # noqa: F403
