"""The reference's path of `torchtitan.data.tokenizer`."""
# ruff: noqa: F401

from torchtitan.data.tokenizer import (
    SPECIAL_TOKEN_KEYS,
    BaseTokenizer,
    HuggingFaceTokenizer,
    build_hf_tokenizer,
)
