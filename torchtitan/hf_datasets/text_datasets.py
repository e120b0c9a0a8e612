"""Alias of `torchtitan.data.text_datasets`, at its path in torchtitan 0.2.x."""

from torchtitan.data.text_datasets import *  # noqa: F403
