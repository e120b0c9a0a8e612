"""Alias of `torchtitan.data`, at its path in torchtitan 0.2.x."""

from torchtitan.data import DatasetConfig

__all__ = ["DatasetConfig"]
