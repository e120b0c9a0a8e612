"""Matrix products of groups of rows, each group with its own matrix, eager and compiled.

N rows in E groups, K columns, M columns of the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from torchtitan.numerics.linear import is_slow_product
from torchtitan.tools import torch_parts

_library = Library("torchtitan", "FRAGMENT")
_library.define("grouped_mm(Tensor x, Tensor weights, Tensor offsets) -> Tensor")
_library.define("grouped_mm_weight_grad(Tensor x, Tensor grad, Tensor offsets) -> Tensor")


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows up to offsets[0] by weights[0], rows from there to offsets[1] by weights[1], ...

    x: [N, K]; weights: [E, K, M] of the same dtype; offsets: [E] int32, ascending. Returns
    [N, M]; rows from offsets[-1] on are undefined.
    """
    # torchao's 8-bit weights override torch's own operator for every dtype.
    is_overridden = has_torch_function_unary(weights)
    if not is_overridden and is_slow_product(x):
        rounded = (t.to(torch.bfloat16).float() for t in (x, weights))
        return torch.ops.torchtitan.grouped_mm(*rounded, offsets).to(torch.bfloat16)
    if not is_overridden and weights.dtype != torch.bfloat16:
        # While compiling, torch's own operator accepts only bf16.
        return torch.ops.torchtitan.grouped_mm(x, weights, offsets)
    return _DenseGradient.apply(F.grouped_mm(x, weights, offs=offsets))


def grouped_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None = None, *, offsets: Tensor
) -> Tensor:
    """`grouped_mm` with weights laid out like a Linear's, [E, M, K] or stored by `nf4`, and biases [E, M] or None.

    offsets: [E], or [E * n] if n consecutive groups have the same weight.
    Rows after the last group may hold nan; they add nothing to the gradient of a bias.
    """
    if (n := offsets.shape[0] // weights.shape[0]) > 1:
        offsets = offsets[n - 1 :: n].contiguous()
    if weights.dtype == torch.uint8:
        out = torch.ops.torchtitan.nf4_mm(x, weights, offsets, False)
    else:
        out = grouped_mm(x, weights.transpose(-2, -1), offsets)
    if biases is None:
        return out
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    group = torch.searchsorted(offsets, rows, right=True)  # [N]; E for rows after the last group
    return out + F.pad(biases, (0, 0, 0, 1))[group]


class _DenseGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient, because the kernel refuses an expanded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, offsets)
        # Skip the "Autograd" kernel, which is this function, so that the operator runs the device's
        # kernel.
        with torch_parts.below_autograd():
            return torch.ops.torchtitan.grouped_mm(x, weights, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, offsets = ctx.saved_tensors
        grad, grad_x, grad_weights = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.torchtitan.grouped_mm(grad, weights.transpose(-2, -1), offsets)
        if ctx.needs_input_grad[1]:
            grad_weights = torch.ops.torchtitan.grouped_mm_weight_grad(x, grad, offsets)
        return grad_x, grad_weights, None


# x [N, K], w [E, K, M] -> [N, M]; x [N, K], g [N, M] -> [E, K, M], x^T g of each group.
for _device in ("CPU", "CUDA"):
    _library.impl("grouped_mm", lambda x, w, ends: F.grouped_mm(x, w, offs=ends), _device)
    _library.impl(
        "grouped_mm_weight_grad", lambda x, g, ends: F.grouped_mm(x.t(), g, offs=ends), _device
    )
_library.impl("grouped_mm", lambda x, w, ends: x.new_empty(x.shape[0], w.shape[-1]), "Meta")
_library.impl(
    "grouped_mm_weight_grad",
    lambda x, g, ends: x.new_empty(ends.shape[0], x.shape[1], g.shape[1]),
    "Meta",
)
_library.impl("grouped_mm", _GroupedMM.apply, "Autograd")
