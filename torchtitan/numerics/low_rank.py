"""The low-rank product of adapters: of one model, or of several, each with tokens of its own.

m models, r rank, K inputs and N outputs of a layer, n tokens of all models.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.numerics.linear import is_slow_product, linear

# Of a model. For fewer, products are up to three times as fast if the rank is the first dimension.
MANY_TOKENS = 256


class LowRank(NamedTuple):
    """scale * x A^T B^T, with each model's A and B for its tokens: what adapters add to a layer's output.

    x [..., K]; a [m, r, K]; b [m, N, r]. sizes: the tokens of each model, one model after another.
    order: indices that sort the rows of x by model; None if they are sorted.
    product: of the layer, `linear` or `exact_linear`.
    """

    x: Tensor
    a: Tensor
    b: Tensor
    sizes: list[int]
    scale: float
    order: Tensor | None = None
    product: Callable[..., Tensor] = linear

    def add_to(self, output: Tensor) -> Tensor:
        """Return output [..., N] plus the product, in output's dtype."""
        x, a, b, sizes, scale, order, product = self
        if order is None:
            return _AddLowRank.apply(output, x, a, b, sizes, scale, product)
        # [B, T, ...], or [B * T, ...] in front of experts, by row.
        base, x = (t.reshape(len(order), -1, t.shape[-1])[order] for t in (output, x))
        added = _AddLowRank.apply(base, x, a, b, sizes, scale, product)
        return added[order.argsort()].view_as(output)


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        sizes: list[int],
        scale: float,
        product: Callable[..., Tensor],
    ) -> Tensor:
        ctx.sizes, ctx.scale = sizes, scale
        with torch.autocast(x.device.type, enabled=False):
            tokens = (t.flatten(0, -2) for t in (output, x))
            # Selective activation checkpointing keeps results of products, so none is changed in place.
            result, low_rank = add_products(*tokens, a, b, sizes, scale, product)
        ctx.save_for_backward(x, a, b, *low_rank)
        return result.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, *low_rank = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            tokens = (t.flatten(0, -2) for t in (grad, x))
            how = low_rank, ctx.sizes, ctx.scale, ctx.needs_input_grad[1]
            grad_x, grad_a, grad_b = gradients_of_products(*tokens, a, b, *how)
        grad_x = None if grad_x is None else grad_x.view_as(x)
        return grad, grad_x, grad_a, grad_b, None, None, None


def add_products(
    output: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    sizes: Sequence[int],
    scale: float,
    product: Callable[..., Tensor],
    in_place: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return (output [n, N] plus the products of x [n, K], in output's dtype; what backward needs).

    The other arguments are those of `LowRank`. A model's rows have the same bits beside other models,
    and so have the gradients. in_place: overwrite output. Without autograd; call it without autocast.
    """
    low_rank = []
    wide = torch.float32 if is_slow_product(output) else output.dtype
    base, x, a, b = (t.to(wide) for t in (output, x, a, b))
    result = base if in_place else torch.empty_like(base)
    for i, rows, few in _parts(sizes, product is linear):
        if product is linear:
            low_rank.append(_times(a[i], rows(x), few) * scale)
            add_product = torch.baddbmm if a[i].dim() == 3 else torch.addmm
            add_product(rows(base), low_rank[-1].mT, b[i].mT, out=rows(result))
        else:
            own = scale * product(rows(x), a[i])
            torch.add(rows(base), product(own, b[i]), out=rows(result))
            low_rank.append(own.mT)
    return result.to(output.dtype), low_rank


def gradients_of_products(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    low_rank: Sequence[Tensor],
    sizes: Sequence[int],
    scale: float,
    wants_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, a and b from the result's gradient grad [n, N]; None without wants_x.

    low_rank: from `add_products`; the other arguments are the same.
    """
    wide = torch.float32 if is_slow_product(grad) else grad.dtype
    grad, rows_of_x = (t.to(wide).contiguous() for t in (grad, x))
    a_wide, b_wide = a.to(wide), b.to(wide)
    new = torch.empty_like if all(sizes) else torch.zeros_like
    grad_a, grad_b = new(a_wide), new(b_wide)
    grad_x = torch.empty_like(rows_of_x) if wants_x else None
    batched = any(own.dim() == 3 for own in low_rank)
    for (i, rows, few), own in zip(_parts(sizes, batched), low_rank, strict=True):
        grad_own = _times(b_wide[i].mT, rows(grad), few).mul_(scale)
        grad_b[i].copy_(_times(own, rows(grad).mT, few).mT)
        torch.matmul(grad_own, rows(rows_of_x), out=grad_a[i])
        if grad_x is not None:
            torch.matmul(grad_own.mT, a_wide[i], out=rows(grad_x))
    grad_x = None if grad_x is None else grad_x.to(x.dtype)
    return grad_x, grad_a.to(a.dtype), grad_b.to(b.dtype)


def _times(matrix: Tensor, others: Tensor, few: bool) -> Tensor:
    """Return matrix [..., r, k] times others [..., n, k] transposed, [..., r, n]. few: tokens."""
    return torch.matmul(matrix, others.mT) if few else torch.matmul(others, matrix.mT).mT


def _parts(
    sizes: Sequence[int], batched: bool
) -> Iterator[tuple[Any, Callable[[Tensor], Tensor], bool]]:
    """Yield (index of models, function that cuts their tokens out of [n, ...], True for few tokens).

    batched: let one batched product compute all models, if they have as many tokens.
    """
    if batched and len(sizes) > 1 and len(set(sizes)) == 1:
        yield slice(None), lambda t: t.view(len(sizes), -1, t.shape[-1]), sizes[0] < MANY_TOKENS
        return
    begin = 0
    for i, size in enumerate(sizes):
        if size:
            cut = slice(begin, begin + size)
            yield i, lambda t, cut=cut: t[cut], size < MANY_TOKENS
        begin += size
