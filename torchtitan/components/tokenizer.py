"""The reference's import path of `torchtitan.data.tokenizer`."""

from torchtitan.data.tokenizer import *  # noqa: F403
