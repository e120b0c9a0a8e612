"""Llama 4's text model on the shared decoder.

B rows, T tokens, H query heads, K key/value heads, D head size.
"""
# ruff: noqa: F401 (names of the reference)

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.models.decoder import Attention, FeedForward, TransformerBlock
from torchtitan.models.llama3.model.model import Transformer as Llama3
from torchtitan.models.llama4.model.args import TransformerModelArgs
from torchtitan.models.moe import build_moe
from torchtitan.models.rope import apply_rotary_emb, precompute_freqs_cis, reshape_for_broadcast


class Transformer(Llama3):
    """Llama 4: layers with RoPE see chunks, layers without RoPE see whole documents; experts.

    Masks are {"rope": within a chunk, "nope": within a document}. With temperature tuning the RoPE
    table is complex64 [L, D/2 + 1]; the last column is the queries' factor at each position.

    Raises ValueError like `TransformerModelArgs.check_layers`, and forward like `check_chunks`.
    """

    model_args: TransformerModelArgs

    def __init__(self, model_args: TransformerModelArgs):
        model_args.check_layers()
        super().__init__(model_args)

    def check_rows(self, attention_masks: Any, row_len: int) -> None:
        # Without a mask of chunks, which only a dict has, sdpa needs rows that fit into one chunk.
        if not isinstance(attention_masks, dict):
            self.model_args.check_chunks(row_len)

    def is_moe_layer(self, layer_id: int) -> bool:
        return (layer_id + 1) % self.model_args.interleave_moe_layer_step == 0

    def build_attention(self, layer_id: int) -> Attention:
        args = self.model_args
        attention = super().build_attention(layer_id)
        if args.is_nope_layer(layer_id):
            attention.mask_name = "nope"
            attention.apply_rope = _scale_queries if args.attn_temperature_tuning else None
        else:
            attention.mask_name = "rope"
            eps = args.norm_eps if args.use_qk_norm else None
            attention.apply_rope = partial(_rotate, norm_eps=eps)
        return attention

    def build_feed_forward(self, layer_id: int) -> nn.Module:
        if not self.is_moe_layer(layer_id):
            return super().build_feed_forward(layer_id)
        args = self.model_args
        return build_moe(args.moe_args, args.dim, args.expert_hidden_dim)

    def build_rope_table(self, length: int) -> Tensor:
        args, table = self.model_args, super().build_rope_table(length)
        if not args.attn_temperature_tuning:
            return table
        if table.device.type == "meta":  # arange there would load torch's compiler
            return table.new_empty(length, table.shape[1] + 1)
        steps = torch.arange(1, length + 1, dtype=torch.float32).div(args.floor_scale).floor()
        factors = torch.log1p(steps) * args.attn_scale + 1.0
        return torch.cat((table, factors[:, None].to(table.dtype)), dim=1)

    def layer_masks(self, documents: DocumentMask) -> Masks:
        chunks = documents.in_chunks(self.model_args.fixed_attn_block_size)
        return {"rope": chunks, "nope": documents}


def _rotate(
    xq: Tensor, xk: Tensor, rows: Tensor, *, norm_eps: float | None
) -> tuple[Tensor, Tensor]:
    """Apply RoPE, then normalise heads unless norm_eps is None; shapes as in `apply_rotary_emb`."""
    xq, xk = apply_rotary_emb(xq, xk, rows[..., : xq.shape[-1] // 2])
    if norm_eps is None:
        return xq, xk
    return _normalise(xq, norm_eps), _normalise(xk, norm_eps)


def _normalise(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def _scale_queries(xq: Tensor, xk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """xq: [B, T, H, D]; rows: complex [1 or B, T, D/2 + 1], with the factor in the last column."""
    factors = torch.view_as_real(rows)[..., -1, 0]
    return (xq * factors[..., None, None]).to(xq.dtype), xk
