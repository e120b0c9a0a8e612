"""Attention for packed documents with the sums of `numerics.exact`, on the CPU.

N packed tokens, H query heads, K key/value heads, g = H / K, D head size, S documents.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan.models.attention_cpu import DocumentAttention
from torchtitan.numerics.exact import KEYS, attend_in_tiles


def exact_heads_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, D] and the log-sum-exp [B, H, T], both fp32.

    q: [B, H, T, D]; k, v: fp32 [B, K, S, D], S a multiple of `KEYS`. visible: bool [1 or B, T, S].
    """
    n_rows, n_heads, n_queries, _ = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads

    def of_group(x: Tensor) -> Tensor:  # [B, H, T, ...] -> [B K, T g, ...]
        x = x.unflatten(1, (n_kv_heads, group)).transpose(2, 3)
        return x.flatten(2, 3).flatten(0, 1)

    def of_heads(x: Tensor) -> Tensor:  # and back
        x = x.unflatten(1, (n_queries, group)).unflatten(0, (n_rows, n_kv_heads))
        return x.transpose(2, 3).flatten(1, 2)

    visible = visible.repeat_interleave(group, dim=1)
    if len(visible) > 1:
        visible = visible.repeat_interleave(n_kv_heads, dim=0)
    results = attend_in_tiles(
        of_group(q.float() * scale), k.flatten(0, 1), v.flatten(0, 1), visible
    )
    return of_heads(results[0]), of_heads(results[1])


def exact_document_attention(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention_cpu.document_attention` of documents whose queries and keys are the same tokens."""
    with torch.autocast(q.device.type, enabled=False):
        return DocumentAttention.apply(_forward, q, *arguments)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    _ends_of_keys: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """q: [N, H, D]; k, v: [N, K, D]; ends: int [S + 1], from 0 to N."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    starts, lengths = ends[:-1].long(), ends.diff().long()
    n_tiles = -(-lengths // KEYS)
    # Documents of one token, such as padding, are group 0: one tile of keys, but only one query.
    n_tiles[lengths == 1] = 0
    for n in n_tiles.unique().tolist():
        of_size = n_tiles == n
        width = 1 if n == 0 else int(lengths[of_size].max())
        columns = torch.arange(max(n, 1) * KEYS)
        places = starts[of_size, None] + columns  # [documents, keys]
        is_token = columns < lengths[of_size, None]
        places = places.clamp(max=len(q) - 1)
        distance = columns[:width, None] - columns
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        keys, values = (x[places].float().transpose(1, 2) for x in (k, v))
        queries = q[places[:, :width]].transpose(1, 2)
        results = exact_heads_attention(queries, keys, values, visible[None], scale)
        into = places[:, :width][is_token[:, :width]]
        for target, result in zip((out, lse), results, strict=True):
            target[into] = result.transpose(1, 2)[is_token[:, :width]].to(target.dtype)
    return out, lse
