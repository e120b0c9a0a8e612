"""The public path of the clients in this process, `torchtitan.integrations.tinker`."""

from torchtitan.integrations.tinker.client import *  # noqa: F403
from torchtitan.integrations.tinker.types import *  # noqa: F403
