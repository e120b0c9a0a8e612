"""The import path in torchtitan 0.2.x of `torchtitan.data.tokenizer`."""

from torchtitan.data.tokenizer import *  # noqa: F403
