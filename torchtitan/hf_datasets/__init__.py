"""The reference's path of `torchtitan.data`."""
# ruff: noqa: F401

from torchtitan.data import DatasetConfig
