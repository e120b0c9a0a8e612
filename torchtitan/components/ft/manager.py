"""The reference's import path of `torchtitan.distributed.fault_tolerance`."""

from torchtitan.distributed.fault_tolerance import *  # noqa: F403
