"""The reference's path of `torchtitan.distributed.fault_tolerance`."""
# ruff: noqa: F401

from torchtitan.distributed.fault_tolerance import FTManager, has_torchft, maybe_semi_sync_training
