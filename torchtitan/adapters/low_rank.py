"""The low-rank product of adapters: of one model, or of several, each with tokens of its own.

m models, r rank, K inputs and N outputs of a layer, n tokens of all models.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.numerics.linear import is_slow_product


def add_low_rank(
    output: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], scale: float
) -> Tensor:
    """Return output + scale * x A^T B^T, with each model's A and B for its tokens, in output's dtype.

    output [..., N]; x [..., K]; a [m, r, K]; b [m, N, r]. sizes: the tokens
    of each model, one model after another. A model's result has the same bits beside other models.
    """
    return _LowRank.apply(output, x, a, b, sizes, scale)


class _LowRank(torch.autograd.Function):
    """Products with r are computed transposed, [r, tokens], which takes a third of the time for few
    tokens."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int], scale: float
    ) -> Tensor:
        wide = torch.float32 if is_slow_product(output) else output.dtype
        ctx.sizes, ctx.scale, ctx.shape, ctx.dtypes = sizes, scale, x.shape, (x.dtype, a.dtype)
        with torch.autocast(x.device.type, enabled=False):
            x, a, b, base = (t.to(wide) for t in (x.flatten(0, -2), a, b, output.flatten(0, -2)))
            # Not in place, because selective activation checkpointing keeps the output.
            result, low_rank = torch.empty_like(base), []
            for i, rows in _parts(sizes):
                low_rank.append(torch.matmul(a[i], rows(x).mT).mul_(scale))
                add_product = torch.baddbmm if a[i].dim() == 3 else torch.addmm
                add_product(rows(base), low_rank[-1].mT, b[i].mT, out=rows(result))
        ctx.save_for_backward(x, a, b, *low_rank)
        return result.to(output.dtype).view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, *low_rank = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        new = torch.empty_like if all(ctx.sizes) else torch.zeros_like
        grad_a, grad_b = new(a), new(b)
        with torch.autocast(x.device.type, enabled=False):
            wide = grad.to(x.dtype).flatten(0, -2).contiguous()
            for (i, rows), own_low_rank in zip(_parts(ctx.sizes), low_rank, strict=True):
                grad_low_rank = torch.matmul(b[i].mT, rows(wide).mT).mul_(ctx.scale)
                grad_b[i].copy_(torch.matmul(own_low_rank, rows(wide)).mT)
                torch.matmul(grad_low_rank, rows(x), out=grad_a[i])
                if grad_x is not None:
                    torch.matmul(grad_low_rank.mT, a[i], out=rows(grad_x))
        x_dtype, dtype = ctx.dtypes
        grad_x = None if grad_x is None else grad_x.to(x_dtype).view(ctx.shape)
        return grad, grad_x, grad_a.to(dtype), grad_b.to(dtype), None, None


def _parts(sizes: Sequence[int]) -> Iterator[tuple[Any, Callable[[Tensor], Tensor]]]:
    """Yield (index of models, function that cuts their tokens out of [n, ...]).

    One batched product computes all models if they have as many tokens; else each has its own.
    """
    if len(set(sizes)) == 1:
        yield slice(None), lambda t: t.view(len(sizes), -1, t.shape[-1])
        return
    begin = 0
    for i, size in enumerate(sizes):
        if size:
            yield i, lambda t, begin=begin, end=begin + size: t[begin:end]
        begin += size
