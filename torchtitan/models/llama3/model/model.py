"""Llama 3 on the shared decoder."""
# ruff: noqa: F401 (names of the reference)

from torch import Tensor

from torchtitan.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.rope import apply_rotary_emb, precompute_freqs_cis, reshape_for_broadcast


class Transformer(Decoder):
    """Llama 3: grouped-query attention, RoPE on neighbouring pairs, SwiGLU."""

    model_args: TransformerModelArgs

    def build_attention(self, layer_id: int) -> Attention:
        args = self.model_args
        return Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.attention_head_dim,
            attn_type=args.attn_type,
            qkv_bias=args.attention_bias,
            output_bias=args.attention_bias,
        )

    def build_feed_forward(self, layer_id: int) -> FeedForward:
        args = self.model_args
        return FeedForward(args.dim, args.ffn_hidden_dim, bias=args.mlp_bias)

    def build_rope_table(self, length: int) -> Tensor:
        args = self.model_args
        return precompute_freqs_cis(
            args.attention_head_dim, length, args.rope_theta, args.rope_scaling_args
        )
