"""The args of a Qwen 3 model."""

from dataclasses import dataclass

from torchtitan.models.moe.args import MoEDecoderArgs


@dataclass
class Qwen3ModelArgs(MoEDecoderArgs):
    """Qwen 3; also Qwen 2 and 2.5, with biases and without norms in attention.

    head_dim: the size of an attention head, independent of dim / n_heads.
    hidden_dim: the hidden size of the feed-forward.
    qk_norm: normalise each head of queries and keys before RoPE (False for Qwen 2).
    qkv_bias: wq, wk and wv have biases (True for Qwen 2).
    moe_enabled: every block has experts of hidden size moe_inter_dim; hidden_dim is not used.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    vocab_size: int = 151936
    head_dim: int = 128
    hidden_dim: int = 3072
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000
    max_seq_len: int = 4096
    eos_id: int = 151645
    qk_norm: bool = True
    qkv_bias: bool = False
    moe_enabled: bool = False
    moe_inter_dim: int = 768
