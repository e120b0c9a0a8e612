"""The reference's path of `torchtitan.data`."""

from torchtitan.data import DatasetConfig

__all__ = ["DatasetConfig"]
