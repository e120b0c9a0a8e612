"""The path of `torchtitan.data` in torchtitan 0.2.x."""

from torchtitan.data import DatasetConfig

__all__ = ["DatasetConfig"]
