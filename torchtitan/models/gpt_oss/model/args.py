"""The args of a gpt-oss model."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.models.moe.args import MoEDecoderArgs


@dataclass
class GptOssModelArgs(MoEDecoderArgs):
    """gpt-oss (arXiv:2508.10925).

    max_batch_size, dtype: not read, accepted for compatibility.
    moe_inter_dim: hidden size of one expert. swiglu_limit: the limit of its activations.
    head_dim: size of an attention head, independent of dim / n_heads.
    sliding_window_size: number of tokens that a token of an even layer sees, itself included.
    original_seq_len, rope_theta, rope_factor, ntk_beta, ntk_alpha: YaRN, see `YaRNArgs`, which
        calls the last two beta_fast and beta_slow; it applies at every sequence length.
    """

    max_batch_size: int = 8
    max_seq_len: int = 131072
    dtype: Literal["bf16", "fp8"] = "bf16"
    vocab_size: int = 201088
    dim: int = 2880
    moe_inter_dim: int = 2880
    n_layers: int = 24
    norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    head_dim: int = 64
    n_heads: int = 64
    n_kv_heads: int = 8
    sliding_window_size: int = 128
    attn_mask_type: str = "causal"
    attn_type: str = "flex"
    original_seq_len: int = 4096
    rope_theta: float = 150000.0
    rope_factor: float = 32
    ntk_alpha: float = 1.0
    ntk_beta: float = 32.0
