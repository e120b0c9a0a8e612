"""The reference's path of `torchtitan.data.dataloader`."""
# ruff: noqa: F401

from torchtitan.data.dataloader import (
    BaseDataLoader,
    DataloaderExhaustedError,
    ParallelAwareDataloader,
)
