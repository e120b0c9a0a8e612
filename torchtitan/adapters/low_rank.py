"""The low-rank product of adapters: of one model, or of several, each with tokens of its own.

m models, r rank, K inputs and N outputs of a layer, n tokens of all models.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.numerics.linear import is_slow_product

# Of a model. For fewer, products are up to three times as fast if the rank is the first dimension.
MANY_TOKENS = 256


class AddLowRank(torch.autograd.Function):
    """output + scale * x A^T B^T, with each model's A and B for its tokens, in output's dtype.

    output [..., N]; x [..., K]; a [m, r, K]; b [m, N, r]. sizes: the tokens of each model, one model
    after another. A model's result has the same bits beside other models.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: list[int], scale: float
    ) -> Tensor:
        ctx.sizes, ctx.scale = sizes, scale
        ctx.wide = wide = torch.float32 if is_slow_product(output) else output.dtype
        low_rank = []
        with torch.autocast(x.device.type, enabled=False):
            base, rows_of_x = (t.flatten(0, -2).to(wide) for t in (output, x))
            # Not in place, because selective activation checkpointing keeps the output.
            result, a_wide, b_wide = torch.empty_like(base), a.to(wide), b.to(wide)
            for i, rows, few in _parts(sizes):
                low_rank.append(_times(a_wide[i], rows(rows_of_x), few).mul_(scale))
                add_product = torch.baddbmm if a_wide[i].dim() == 3 else torch.addmm
                add_product(rows(base), low_rank[-1].mT, b_wide[i].mT, out=rows(result))
        ctx.save_for_backward(x, a, b, *low_rank)
        return result.to(output.dtype).view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, *low_rank = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            rows_of_x, wide = (t.flatten(0, -2).to(ctx.wide).contiguous() for t in (x, grad))
            a_wide, b_wide = a.to(ctx.wide), b.to(ctx.wide)
            new = torch.empty_like if all(ctx.sizes) else torch.zeros_like
            grad_a, grad_b = new(a_wide), new(b_wide)
            grad_x = torch.empty_like(rows_of_x) if ctx.needs_input_grad[1] else None
            for (i, rows, few), own_low_rank in zip(_parts(ctx.sizes), low_rank, strict=True):
                grad_low_rank = _times(b_wide[i].mT, rows(wide), few).mul_(ctx.scale)
                grad_b[i].copy_(_times(own_low_rank, rows(wide).mT, few).mT)
                torch.matmul(grad_low_rank, rows(rows_of_x), out=grad_a[i])
                if grad_x is not None:
                    torch.matmul(grad_low_rank.mT, a_wide[i], out=rows(grad_x))
        grad_x = None if grad_x is None else grad_x.to(x.dtype).view_as(x)
        return grad, grad_x, grad_a.to(a.dtype), grad_b.to(b.dtype), None, None


def _times(matrix: Tensor, others: Tensor, few: bool) -> Tensor:
    """Return matrix [..., r, k] times others [..., n, k] transposed, [..., r, n]. few: tokens."""
    return torch.matmul(matrix, others.mT) if few else torch.matmul(others, matrix.mT).mT


def _parts(sizes: Sequence[int]) -> Iterator[tuple[Any, Callable[[Tensor], Tensor], bool]]:
    """Yield (index of models, function that cuts their tokens out of [n, ...], True for few tokens).

    One batched product computes all models if they have as many tokens; else each has its own.
    """
    if len(sizes) > 1 and len(set(sizes)) == 1:
        yield slice(None), lambda t: t.view(len(sizes), -1, t.shape[-1]), sizes[0] < MANY_TOKENS
        return
    begin = 0
    for i, size in enumerate(sizes):
        if size:
            cut = slice(begin, begin + size)
            yield i, lambda t, cut=cut: t[cut], size < MANY_TOKENS
        begin += size
