"""The import path in torchtitan 0.2.x of `torchtitan.loss`."""

from torchtitan.loss.aggregation import *  # noqa: F403
from torchtitan.loss.cross_entropy import *  # noqa: F403
