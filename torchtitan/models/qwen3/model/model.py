"""Qwen 3 on the shared decoder."""
# ruff: noqa: F401 (names of the reference)

from torch import Tensor

from torchtitan.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from torchtitan.models.moe import MoE, build_moe
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.rope import apply_rotary_emb_to_halves as apply_rotary_emb
from torchtitan.models.rope import precompute_rope_cache


class Qwen3Model(Decoder):
    """Qwen 3: normalised queries and keys, RoPE on halves, SwiGLU or experts."""

    model_args: Qwen3ModelArgs
    rope_buffer_name = "rope_cache"

    def __init__(self, model_args: Qwen3ModelArgs):
        super().__init__(model_args)
        self.head_dim = model_args.head_dim

    def build_attention(self, layer_id: int) -> Attention:
        args = self.model_args
        return Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_dim,
            attn_type=args.attn_type,
            qkv_bias=args.qkv_bias,
            qk_norm_eps=args.norm_eps if args.qk_norm else None,
            apply_rope=apply_rotary_emb,
        )

    def build_feed_forward(self, layer_id: int) -> FeedForward | MoE:
        args = self.model_args
        if args.moe_enabled:
            return build_moe(args.moe_args, args.dim, args.moe_inter_dim)
        return FeedForward(args.dim, args.hidden_dim)

    def is_moe_layer(self, layer_id: int) -> bool:
        return self.model_args.moe_enabled

    def build_rope_table(self, length: int) -> Tensor:
        args = self.model_args
        return precompute_rope_cache(args.head_dim, length, args.rope_theta)
