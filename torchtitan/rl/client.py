"""Public import path of the in-process Tinker client in `torchtitan.integrations.tinker`."""

from torchtitan.integrations.tinker.client import *  # noqa: F403
from torchtitan.integrations.tinker.types import *  # noqa: F403
