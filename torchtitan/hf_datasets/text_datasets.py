"""The path of `torchtitan.data.text_datasets` in torchtitan 0.2.x."""

from torchtitan.data.text_datasets import *  # noqa: F403
