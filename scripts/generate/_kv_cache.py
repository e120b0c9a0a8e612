"""Keys and values of the tokens seen so far, so that the next token costs one token's forward.

B rows, T tokens in one call, S tokens in this and all earlier calls, H query heads, K key/value
heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.decoder import Decoder

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class CachedAttention(FlexAttentionWrapper):
    """Stands in for a layer's attention kernel and looks at all tokens since it was made.

    max_length: how many tokens there is room for.
    """

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.length = 0
        # Plain tensors: a buffer would appear among the model's own.
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: "BlockMask",
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q: [B, H, T, D]; k, v: [B, K, T, D]. Returns [B, H, T, Dv], and the log-sum-exp of the
        scores [B, H, T] if asked.

        block_mask: one on which `_look_from` was called for these T tokens.
        """
        keys, values = self._append(k, v)
        if return_lse:
            return _attention_with_lse(q, keys, values, block_mask.allowed, scale)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=block_mask.allowed, scale=scale, enable_gqa=enable_gqa
        )

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v; return those of all tokens, [B, K, S, D]."""
        first, end = self.length, self.length + k.shape[2]
        if self.keys is None or self.values is None:
            # Only now are batch size, heads, dtype and device known.
            self.keys, self.values = (
                x.new_empty(*x.shape[:2], self.max_length, x.shape[3]) for x in (k, v)
            )
        self.keys[:, :, first:end] = k
        self.values[:, :, first:end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """[B, H, T, Dv] and [B, H, T], step by step in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed, -torch.inf)
    return (scores.softmax(dim=-1) @ v).to(q.dtype), scores.logsumexp(dim=-1)


def _look_from(block_mask: "BlockMask", first: int, end: int, device: torch.device) -> None:
    """Set `block_mask.allowed`, bool [T, S]: which of S tokens each of the last T may look at.

    The mask is that of all positions; only these rows of it are evaluated.
    """
    queries = torch.arange(first, end, device=device)[:, None]
    keys = torch.arange(end, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    block_mask.allowed = block_mask.mask_mod(zero, zero, queries, keys)


@contextmanager
def kv_cache(model: Decoder, max_length: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a forward that remembers: new tokens [B, T] -> their logits [B, T, V].

    Each call takes only the tokens that follow those of the calls before, the same rows each
    time. All tokens of a row are one document, whatever mask the model is trained with, and each
    layer looks as far back as the model's `build_causal_masks` has it; so every family and every
    attn_type works. Inside the context the model cannot be used in another way.

    max_length: at most this many tokens a row.
    Raises ValueError for a model whose layers don't have an attention kernel to replace, and for
    max_length beyond the RoPE table.
    """
    layers = _attention_layers(model)
    _check_positions(model, max_length)
    kernels = [layer.inner_attention for layer in layers]
    device = getattr(model, model.rope_buffer_name).device
    masks = model.build_causal_masks(torch.zeros(1, max_length, dtype=torch.int64, device=device))
    n_seen = 0

    def forward(tokens: Tensor) -> Tensor:
        nonlocal n_seen
        end = n_seen + tokens.shape[1]
        if end > max_length:
            raise ValueError(
                f"the cache was made for {max_length} tokens and {end} are given; raise max_length"
            )
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            _look_from(mask, n_seen, end, device)
        positions = torch.arange(n_seen, end, device=device)
        n_seen = end
        return model(tokens, attention_masks=masks, positions=positions[None])

    for layer in layers:
        layer.inner_attention = CachedAttention(max_length)
    try:
        yield forward
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.inner_attention = kernel


def _attention_layers(model: Decoder) -> list[nn.Module]:
    layers = [module for module in model.modules() if hasattr(module, "inner_attention")]
    if not isinstance(model, Decoder) or len(layers) != len(model.layers):
        raise ValueError(
            f"generation needs a model on torchtitan.models.decoder.Decoder whose layers have an "
            f"inner_attention each, got {type(model).__name__}"
        )
    return layers


def _check_positions(model: Decoder, max_length: int) -> None:
    n_positions = getattr(model, model.rope_buffer_name).shape[0]
    if max_length > n_positions:
        raise ValueError(
            f"prompt and new tokens together are {max_length} tokens, and the model's RoPE table "
            f"holds {n_positions} positions; lower --max_new_tokens, shorten --prompt, or raise "
            "training.seq_len, which sets the table's length"
        )
