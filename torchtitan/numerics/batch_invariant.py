"""Operations that give a token the same bits whichever other tokens are in the batch.

Libraries choose a matmul's kernel, and with it the reduction order, by the matmul's shape. Here shapes do
not depend on the batch: linear layers get blocks of `ROWS` tokens, attention gets tiles of `QUERIES`
queries and `KEYS` keys, added in order; tiles that a query does not see add zeros. Elementwise
functions round all elements of a tensor in the same way. The exceptions are torch's `silu` and complex
product: they round the last elements differently if these don't fill a vector register. Backward is that of
the ordinary operations.

n products, B rows, T tokens, R queries, S keys, H query heads, K key/value heads, D head size, M
inputs, N outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.numerics.linear import is_slow_product, linear
from torchtitan.numerics.nf4 import dequantize

# A linear layer reads its weight once per ROWS rows. Fewer rows are padded to ROWS, so generating one token
# costs as much as ROWS tokens.
ROWS, QUERIES, KEYS = 32, 8, 64


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, in blocks of `ROWS` rows: x [..., M] times weight [N, M] transposed, plus bias [N]."""
    weight = dequantize(weight, x.dtype) if weight.dtype == torch.uint8 else weight
    operands = [x, weight, bias]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [None if t is None else t.to(dtype) for t in operands]
    return _BatchInvariantLinear.apply(*operands)


class _BatchInvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return _in_blocks(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            rows = grad.flatten(0, -2)
            return (
                linear(grad, weight.t()) if wants_x else None,
                linear(rows.t(), x.flatten(0, -2).t()) if wants_weight else None,
                rows.sum(0) if wants_bias else None,
            )


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, dtype = x.flatten(0, -2), x.dtype
    if is_slow_product(x):  # in fp32, as `linear` does, with one copy of the weight for all blocks
        rows, weight, bias = (None if t is None else t.float() for t in (rows, weight, bias))
    n_rows = len(rows)
    out = rows.new_empty(-(-n_rows // ROWS) * ROWS, len(weight))
    for first in range(0, n_rows, ROWS):
        block, into = rows[first : first + ROWS], out[first : first + ROWS]
        if len(block) < ROWS:
            block = F.pad(block, (0, 0, 0, ROWS - len(block)))
        if bias is None:
            torch.mm(block, weight.t(), out=into)
        else:
            torch.addmm(bias, block, weight.t(), out=into)
    return out[:n_rows].view(*x.shape[:-1], len(weight)).to(dtype)


def batch_invariant_silu(x: Tensor) -> Tensor:
    """`F.silu`: x / (1 + exp(-x)), in fp32 and rounded once."""
    return _BatchInvariantSiLU.apply(x)


class _BatchInvariantSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        numbers = x.to(torch.promote_types(x.dtype, torch.float32))
        return numbers.div(numbers.neg().exp_().add_(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention's output [n, R, D] and the log-sum-exp of the scores [n, R], both fp32.

    q: [n, R, D], scaled; k, v: [n, S, D], S a multiple of `KEYS`; all fp32. visible: bool [1 or n, R, S],
    at least one key for each query.
    """
    n_queries = q.shape[1]
    n_missing = -n_queries % QUERIES
    q, visible = F.pad(q, (0, 0, 0, n_missing)), F.pad(visible, (0, 0, 0, n_missing))
    visible[:, n_queries:, 0] = True
    # ends: for each tile of queries, the index after the last key tile that one of its queries sees.
    seen = visible.view(len(visible), -1, QUERIES, visible.shape[-1] // KEYS, KEYS)
    seen = seen.any(dim=4).any(dim=2).any(dim=0)
    ends = (seen * torch.arange(1, seen.shape[1] + 1)).amax(dim=1).tolist()
    outs, sums = [], []
    for number, end in enumerate(ends):
        queries = slice(number * QUERIES, (number + 1) * QUERIES)
        tiles = [slice(i * KEYS, (i + 1) * KEYS) for i in range(end)]
        own = q[:, queries].contiguous()
        scores = [
            torch.bmm(own, k[:, keys].transpose(1, 2)).masked_fill_(
                ~visible[:, queries, keys], -torch.inf
            )
            for keys in tiles
        ]
        highest = torch.stack([tile.amax(-1) for tile in scores]).amax(0)
        total, out = torch.zeros_like(highest), torch.zeros_like(own[..., : v.shape[-1]])
        for tile, keys in zip(scores, tiles, strict=True):
            exps = tile.sub_(highest[..., None]).exp_()
            total += exps.sum(-1)
            out.baddbmm_(exps, v[:, keys])
        outs.append(out.div_(total[..., None]))
        sums.append(highest.add_(total.log_()))
    return torch.cat(outs, dim=1)[:, :n_queries], torch.cat(sums, dim=1)[:, :n_queries]


def attend_to_visible(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, D] and the log-sum-exp [B, H, T], both fp32.

    q: [B, H, T, D]; k, v: fp32 [B, K, S, D], S a multiple of `KEYS`. visible: bool [1 or B, T, S].
    """
    n_rows, n_heads, n_queries, _ = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads

    def of_group(x: Tensor) -> Tensor:  # [B, H, T, ...] -> [B * K, T * group, ...]
        x = x.unflatten(1, (n_kv_heads, group)).transpose(2, 3)
        return x.flatten(2, 3).flatten(0, 1)

    def of_heads(x: Tensor) -> Tensor:  # the inverse of `of_group`
        x = x.unflatten(1, (n_queries, group)).unflatten(0, (n_rows, n_kv_heads))
        return x.transpose(2, 3).flatten(1, 2)

    visible = visible.repeat_interleave(group, dim=1)
    if len(visible) > 1:
        visible = visible.repeat_interleave(n_kv_heads, dim=0)
    results = attend_in_tiles(
        of_group(q.float() * scale), k.flatten(0, 1), v.flatten(0, 1), visible
    )
    return of_heads(results[0]), of_heads(results[1])
