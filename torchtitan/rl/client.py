"""The public path of `torchtitan.integrations.tinker.client`."""

from torchtitan.integrations.tinker.client import *  # noqa: F403
