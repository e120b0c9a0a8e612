"""The low-rank product of adapters, for one model, or for several models that each have their own tokens.

m models, r rank, K inputs and N outputs of a layer, n tokens of all models.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from torchtitan.numerics.linear import is_slow_product, linear
from torchtitan.numerics.products import mm, mm_of_few_rows


class LowRank(NamedTuple):
    """What adapters add to a layer's output: scale * x A^T B^T, with A and B of each token's model.

    x [..., K]; a [m, r, K]; b [m, N, r]. sizes: the number of tokens of each model.
    order: indices that sort the rows of x by model; None if they are sorted.
    product: the layer's matmul function, `linear` or `batch_invariant_linear`.
    """

    x: Tensor
    a: Tensor
    b: Tensor
    sizes: list[int]
    scale: float
    order: Tensor | None = None
    product: Callable[..., Tensor] = linear

    def add_to(self, output: Tensor) -> Tensor:
        """Return output [..., N] plus the low-rank product, in output's dtype."""
        x, a, b, sizes, scale, order, product = self
        if torch.compiler.is_compiling() and len(sizes) == 1:
            return _sum_to_compile(output, x, a.squeeze(0), b.squeeze(0), scale, product)
        if order is None:
            return _AddLowRank.apply(output, x, a, b, sizes, scale, product)
        base, x = _by_model(output, order), _by_model(x, order)
        added = _AddLowRank.apply(base, x, a, b, sizes, scale, product)
        return added[order.argsort()].view_as(output)

    def add_to_layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's product of x [..., K] plus the low-rank product.

        weight [N, K]; bias [N]. x is also the input of the low-rank product, unless the adapter has dropout.
        """
        if (
            self.product is not linear
            or self.x is not x
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(x.device.type)
            or is_slow_product(x)
            or weight.requires_grad
            or weight.dtype == torch.uint8
            or (bias is not None and bias.requires_grad)
        ):
            return self.add_to(self.product(x, weight, bias))
        own = self.a, self.b, self.sizes, self.scale
        if self.order is None:
            return _FrozenLinear.apply(x, weight, bias, *own)
        output = _FrozenLinear.apply(_by_model(x, self.order), weight, bias, *own)
        return output[self.order.argsort()].view(*x.shape[:-1], -1)


def _by_model(t: Tensor, order: Tensor) -> Tensor:
    """Return t, [B, T, ...] or in MoE layers [B * T, ...], as rows [B, T, ...] in the given order."""
    return t.reshape(len(order), -1, t.shape[-1])[order]


def _sum_to_compile(
    output: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, product: Callable[..., Tensor]
) -> Tensor:
    """`LowRank.add_to` for one model, in a form that the compiler fuses."""
    if x.device.type != "cpu" or is_slow_product(x) or product is not linear:
        # On a GPU the compiler fuses the sum into the kernel that reads it; `addmm` would copy the output.
        return output + product(scale * product(x, a), b)
    # `addmm` is one kernel: a separate addition to the output would take as much time as the product.
    low_rank = linear(a, x.flatten(0, -2)).t()
    b = b.t().contiguous()  # b's gradient is then computed as [r, N], faster than [N, r]
    return torch.addmm(output.flatten(0, -2), low_rank, b, alpha=scale).view_as(output)


# ---- a frozen layer and its adapters ----

_library = library.Library("torchtitan", "FRAGMENT")
_library.define(
    "linear_with_low_rank(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, int[] sizes, "
    "float scale) -> Tensor[]"
)


def _linear_with_low_rank(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    sizes: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Return [output [n, N], *what backward needs]; weight is transposed, [K, N].

    One operator, so that selective activation checkpointing doesn't keep the layer's own product.
    """
    output = mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    output, low_rank = add_products(output, x, a, b, sizes, scale, linear, in_place=True)
    return [output, *low_rank]


_library.impl("linear_with_low_rank", _linear_with_low_rank, "CompositeExplicitAutograd")


class _FrozenLinear(torch.autograd.Function):
    """Adds the low-rank product to a frozen layer's product in place, and in backward the gradients of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        sizes: list[int],
        scale: float,
    ) -> Tensor:
        ctx.sizes, ctx.scale = sizes, scale
        operands = x.flatten(0, -2), weight.t(), bias, a, b, sizes, scale
        output, *low_rank = torch.ops.torchtitan.linear_with_low_rank.default(*operands)
        ctx.save_for_backward(x, weight, a, b, *low_rank)
        return output.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, *low_rank = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = mm(rows, weight) if ctx.needs_input_grad[0] else None
        how = low_rank, ctx.sizes, ctx.scale, ctx.needs_input_grad[0], grad_x
        grad_x, grad_a, grad_b = gradients_of_products(rows, x.flatten(0, -2), a, b, *how)
        grad_x = None if grad_x is None else grad_x.view_as(x)
        return grad_x, None, None, grad_a, grad_b, None, None


# ---- any layer, whose output is given ----


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
            # Not in place: selective activation checkpointing keeps results of products, which must not change.
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
    """Return output [n, N] plus the low-rank products of x [n, K], and the tensors that backward needs.

    The sum has output's dtype. Arguments: see `LowRank`. Other models in the call don't change the bits of a
    model's result and gradients. in_place: overwrite output. No autograd; call it without autocast.
    Products have r as first dimension: with a small last dimension MKL takes five times as long.
    """
    low_rank = []
    wide = torch.float32 if is_slow_product(output) else output.dtype
    base, x, a, b = (t.to(wide) for t in (output, x, a, b))
    result = base if in_place else torch.empty_like(base)
    for i, rows in _parts(sizes, product is linear):
        if product is linear:
            own = mm_of_few_rows(a[i], rows(x).mT)
            _add(rows(base), own.mT, b[i].mT, scale, out=rows(result))
        else:
            own = product(rows(x), a[i]).mT
            torch.add(rows(base), product(scale * own.mT, b[i]), out=rows(result))
        low_rank.append(own)
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
    grad_x: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, a and b from the result's gradient grad [n, N].

    wants_x: if False, x's gradient is None. grad_x: a tensor that x's gradient is added to, in place.
    low_rank: from `add_products`; the other arguments are the same.
    """
    wide = torch.float32 if is_slow_product(grad) else grad.dtype
    grad, rows_of_x, a_wide, b_wide = (t.to(wide) for t in (grad.contiguous(), x, a, b))
    new = torch.empty_like if all(sizes) else torch.zeros_like
    grad_a, grad_b = new(a_wide), new(b_wide.mT, memory_format=torch.contiguous_format)
    beta = 0 if grad_x is None else 1
    if wants_x and grad_x is None:
        grad_x = torch.empty_like(rows_of_x)
    batched = any(own.dim() == 3 for own in low_rank)
    for (i, rows), own in zip(_parts(sizes, batched), low_rank, strict=True):
        grad_own = mm_of_few_rows(b_wide[i].mT, rows(grad).mT)
        torch.mul(mm_of_few_rows(own, rows(grad)), scale, out=grad_b[i])
        torch.mul(mm_of_few_rows(grad_own, rows(rows_of_x)), scale, out=grad_a[i])
        if wants_x:
            _add(rows(grad_x), grad_own.mT, a_wide[i], scale, beta=beta, out=rows(grad_x))
    grad_x = None if grad_x is None else grad_x.to(x.dtype)
    return grad_x, grad_a.to(a.dtype), grad_b.mT.to(b.dtype)


def _add(base: Tensor, a: Tensor, b: Tensor, scale: float, *, beta: int = 1, out: Tensor) -> None:
    """out = beta * base + scale * a b, for matrices or batches of matrices."""
    (torch.baddbmm if a.dim() == 3 else torch.addmm)(base, a, b, beta=beta, alpha=scale, out=out)


def _parts(sizes: Sequence[int], batched: bool) -> Iterator[tuple[Any, Callable[[Tensor], Tensor]]]:
    """Yield (index or slice of models, function that takes these models' tokens from [n, ...]).

    batched: use one batched product for all models, if all have the same number of tokens.
    """
    if len(sizes) == 1:
        yield 0, lambda t: t
        return
    if batched and len(set(sizes)) == 1:
        yield slice(None), lambda t: t.view(len(sizes), -1, t.shape[-1])
        return
    begin = 0
    for i, size in enumerate(sizes):
        if size:
            cut = slice(begin, begin + size)
            yield i, lambda t, cut=cut: t[cut]
        begin += size
