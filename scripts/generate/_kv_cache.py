"""Keys and values of the tokens seen so far, so that the next token costs one token's forward.

B rows, T tokens in one call, S tokens in this and all earlier calls, H query heads, K key/value
heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.models.decoder import Decoder


class CachedAttention(nn.Module):
    """Stands in for a layer's attention kernel: causal, over all tokens since it was made.

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
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool
    ) -> Tensor:
        """q: [B, H, T, D]; k, v: [B, K, T, D]. Returns [B, H, T, Dv]."""
        first, n_new = self.length, q.shape[2]
        keys, values = self._append(k, v)
        # One query is the last token and sees all keys; the first call is causal as usual.
        mask = None
        if first > 0 and n_new > 1:
            mask = torch.ones(n_new, first + n_new, dtype=torch.bool, device=q.device)
            mask = mask.tril(diagonal=first)
        return F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=first == 0 and n_new > 1,
            scale=scale,
            enable_gqa=enable_gqa,
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


@contextmanager
def kv_cache(model: Decoder, max_length: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a forward that remembers: new tokens [B, T] -> their logits [B, T, V].

    Each call takes only the tokens that follow those of the calls before, the same rows each
    time. All tokens of a row are one document, whatever mask the model is trained with, so every
    attn_type works. Inside the context the model cannot be used in another way.

    max_length: at most this many tokens a row.
    Raises ValueError for a model whose layers don't all look at all earlier tokens, or don't
    have an attention kernel to replace, and for max_length beyond the RoPE table.
    """
    layers = _attention_layers(model)
    _check_positions(model, max_length)
    kernels = [layer.inner_attention for layer in layers]
    n_seen = 0

    def forward(tokens: Tensor) -> Tensor:
        nonlocal n_seen
        end = n_seen + tokens.shape[1]
        if end > max_length:
            raise ValueError(
                f"the cache was made for {max_length} tokens and {end} are given; raise max_length"
            )
        positions = torch.arange(n_seen, end, device=tokens.device)
        n_seen = end
        return model(tokens, positions=positions[None])

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
    if any(getattr(layer, "mask_name", None) is not None for layer in layers):
        raise ValueError(
            f"generation is not available yet for {type(model).__name__}: its layers have "
            "different masks, and the cache knows the causal one only"
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
