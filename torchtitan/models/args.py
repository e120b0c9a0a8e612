"""The args that all families share."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.numerics.norm import NormKind
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger


@dataclass
class DecoderArgs(BaseModelArgs):
    """The args of every family, which the decoder reads.

    attn_type: "sdpa", "flex" or "varlen". attn_mask_type: see `config.mask_types`.
    depth_init: scale initial weights of residual branches by the layer's index, not by n_layers.
    value_head: the model returns one value per token; this turns enable_weight_tying off.
    fp32_head: compute the output projection in fp32, even under autocast or FSDP's casts.
    norm_kind: see `numerics.norm`. norm_placement: see `TransformerBlock`.
    hidden_act: the activation of dense feed-forwards, a key of `feed_forward.ACTIVATIONS`.
    layer_scale: each block multiplies its result by a factor that is saved and not trained.
    embedding_scale, residual_scale: factors on embeddings, and on the results of attention and
        feed-forward. logits_divisor: divides the logits. logits_cap: c, for logits c * tanh(logits / c).
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    vocab_size: int = 128256
    norm_eps: float = 1e-5
    rope_theta: float = 10000
    max_seq_len: int = 131072
    depth_init: bool = True
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"
    eos_id: int = 0
    enable_weight_tying: bool = False
    value_head: bool = False
    fp32_head: bool = False
    norm_kind: NormKind = "late"
    norm_placement: Literal["before", "after", "both"] = "before"
    hidden_act: str = "silu"
    layer_scale: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self) -> None:
        self.enable_weight_tying = self.enable_weight_tying and not self.value_head

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Read the RoPE length from training.seq_len, and the attention and head settings from [model]."""
        seq_len = job_config.training.seq_len
        if seq_len > self.max_seq_len:
            logger.warning(
                "training.seq_len = %d is longer than the %d positions this flavor was made for",
                seq_len,
                self.max_seq_len,
            )
        self.max_seq_len = seq_len
        self.attn_type = job_config.model.attn_type or self.attn_type
        self.attn_mask_type = job_config.model.attn_mask_type or self.attn_mask_type
        self.value_head = job_config.model.value_head or self.value_head
        self.fp32_head = job_config.model.fp32_head or self.fp32_head
        self.__post_init__()

    @property
    def attention_head_dim(self) -> int:
        """The size of an attention head: the family's head_dim if it has one, else dim / n_heads."""
        head_dim = getattr(self, "head_dim", None)
        return self.dim // self.n_heads if head_dim is None else head_dim

    @property
    def head_dims(self) -> int:
        """The query head size plus the value head size."""
        return 2 * self.attention_head_dim

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return (number of parameters, FLOPs of forward and backward per token)."""
        return get_moe_model_nparams_and_flops(self, model, self.head_dims, seq_len)
