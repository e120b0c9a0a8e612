"""The args of a Llama 4 model."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.models import rope
from torchtitan.models.llama3.model.args import TransformerModelArgs as Llama3ModelArgs
from torchtitan.models.moe import MoEDecoderArgs


@dataclass
class RoPEScalingArgs(rope.RoPEScalingArgs):
    """Llama 4 Scout's: slow frequencies are stretched 16 times, without a blend."""

    scaling_factor: float = 16.0
    high_freq_factor: float = 1.0


@dataclass
class TransformerModelArgs(Llama3ModelArgs, MoEDecoderArgs):
    """Llama 4's text model: Llama 3 plus layers without RoPE, chunks, and experts.

    every_n_layers_nope: layers n - 1, 2 n - 1, ... (counted from 0) have no RoPE, and a token sees
        its whole document; None: no such layers.
    fixed_attn_block_size: in the other layers a token sees only its chunk of this many tokens.
        The first chunk begins with the document.
    interleave_moe_layer_step: layers s - 1, 2 s - 1, ... have experts; 1 means all.
    auto_scale_hidden_dim: the experts of a token together are as wide as one feed-forward.
    moe_inter_dim: the hidden size of an expert, in place of that rule.
    use_qk_norm: RMS-normalise each head of queries and keys after RoPE, without weights.
    attn_temperature_tuning: in layers without RoPE, multiply the query at position p by
        1 + attn_scale * log(1 + floor((p + 1) / floor_scale)) (arXiv:2501.19399).
    """

    vocab_size: int = 202048
    max_seq_len: int = 1048576
    rope_scaling_args: RoPEScalingArgs | None = None
    every_n_layers_nope: int | None = None
    fixed_attn_block_size: int = 8192
    auto_scale_hidden_dim: bool = True
    interleave_moe_layer_step: int = 2
    moe_inter_dim: int | None = None
    use_qk_norm: bool = False
    attn_temperature_tuning: bool = False
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def is_nope_layer(self, layer_id: int) -> bool:
        """Return True if the layer has no RoPE and sees whole documents."""
        interval = self.every_n_layers_nope
        return interval is not None and (layer_id + 1) % interval == 0

    @property
    def expert_hidden_dim(self) -> int:
        """The hidden size of one expert, routed or shared."""
        if self.moe_inter_dim is not None:
            return self.moe_inter_dim
        per_token = self.moe_args.top_k + self.moe_args.num_shared_experts
        return self.hidden_dim_by_rule(per_token if self.auto_scale_hidden_dim else 1)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """As `MoEDecoderArgs.update_from_config`. Raises ValueError like `check_chunks`."""
        super().update_from_config(job_config, **kwargs)
        self.check_chunks(self.max_seq_len)

    def check_layers(self) -> None:
        """Raise ValueError for an interval or a size that is too small."""
        smallest = {
            "every_n_layers_nope": 2,
            "interleave_moe_layer_step": 1,
            "fixed_attn_block_size": 1,
            "floor_scale": 1,
        }
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(
                    f"{name} of a Llama 4 flavor must be at least {least}, got {value}; correct it"
                )

    def check_chunks(self, seq_len: int) -> None:
        """Raise ValueError for sdpa, which cannot mask chunks, if rows are longer than a chunk."""
        if self.attn_type == "sdpa" and seq_len > self.fixed_attn_block_size:
            raise ValueError(
                f"attn_type 'sdpa' cannot keep the chunks of {self.fixed_attn_block_size} tokens "
                f"apart, got rows of {seq_len}; set model.attn_type to 'flex' or 'varlen', or "
                f"training.seq_len to at most {self.fixed_attn_block_size}"
            )
