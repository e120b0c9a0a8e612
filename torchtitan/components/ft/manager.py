"""The import path in torchtitan 0.2.x of `torchtitan.distributed.fault_tolerance`."""

from torchtitan.distributed.fault_tolerance import *  # noqa: F403
