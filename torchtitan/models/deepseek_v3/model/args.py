"""The args of a DeepSeek-V3 model."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.models.moe import MoEDecoderArgs


@dataclass
class DeepSeekV3ModelArgs(MoEDecoderArgs):
    """DeepSeek-V2 and V3.

    max_batch_size: not read, accepted for compatibility.
    inter_dim, moe_inter_dim: hidden size of the dense feed-forward and of one expert.
    n_dense_layers: number of first layers, which have no experts.
    q_lora_rank: size of the latent that queries are projected from; 0: no latent.
    kv_lora_rank: size of the latent that keys and values are projected from.
    qk_nope_head_dim, qk_rope_head_dim: sizes of a query and key head's parts without and with
        RoPE.
    expert_parallel_comm_backend: only "standard" can be built.
    original_seq_len, rope_theta, rope_factor, beta_fast, beta_slow: YaRN, see `YaRNArgs`; it
        applies at every sequence length, and rope_factor 1 turns it off.
    mscale: `yarn_mscale`'s argument, Hugging Face's `mscale_all_dim`.
    """

    max_batch_size: int = 8
    max_seq_len: int = 4096 * 4
    vocab_size: int = 102400
    dim: int = 2048
    inter_dim: int = 10944
    moe_inter_dim: int = 1408
    n_layers: int = 27
    n_dense_layers: int = 1
    n_heads: int = 16
    norm_eps: float = 1e-6
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0

    @property
    def head_dims(self) -> int:
        """The query head size plus the value head size."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
