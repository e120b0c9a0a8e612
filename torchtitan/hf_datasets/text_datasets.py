"""The reference's path of `torchtitan.data.text_datasets`."""

from torchtitan.data.text_datasets import *  # noqa: F403
