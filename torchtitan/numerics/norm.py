"""RMS normalisation whose gradient takes a third of the time on the CPU.

torch's RMSNorm on the CPU consists of elementwise steps, each of which passes over memory in backward.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NormKind = Literal["late", "early", "offset"]
"""How a norm weights the normalised x: by w after rounding x; by w before rounding; by 1 + w before rounding."""


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    """`F.rms_norm`, bit for bit (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if (
        x.device.type != "cpu"
        or torch.compiler.is_compiling()  # the compiler fuses the steps
        or weight is None
        or eps is None
        or len(normalized_shape) != 1
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or any(hasattr(t, "placements") for t in (x, weight))  # a DTensor
    ):
        return F.rms_norm(x, normalized_shape, weight, eps)
    if not torch.is_grad_enabled():
        return (x * _factor(x, eps)).mul_(weight)
    return _RMSNorm.apply(x, weight, eps)


def _factor(x: Tensor, eps: float) -> Tensor:
    # These are the steps of torch's forward on other devices and in compiled blocks, so the bits are equal.
    return x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, computed by `rms_norm`. The weight starts at 1, or at 0 in an offset norm."""

    kind: NormKind = "late"

    def __init__(self, dim: int, eps: float, kind: NormKind = "late"):
        super().__init__(dim, eps=eps)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x [..., M] normalised and scaled. weight: [M], which may be a rank's local tensor."""
        if self.kind == "late":
            return rms_norm(x, self.normalized_shape, weight, self.eps)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = weight.to(dtype)
        weight = weight + 1 if self.kind == "offset" else weight
        return rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(x.dtype)

    def reset_parameters(self) -> None:
        fill = nn.init.zeros_ if self.kind == "offset" else nn.init.ones_
        fill(self.weight)


class _RMSNorm(torch.autograd.Function):
    """The RMS norm of x [..., M] with weight [M], both fp32, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        factor = _factor(x, eps)
        ctx.save_for_backward(x, weight, factor)
        return (x * factor).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, factor = ctx.saved_tensors
        # With f the factor: df/dx = -f^3 x / M, so grad_x = f w g - x f^3 (g w . x) / M.
        products = (grad * x).reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            shared = (products @ weight).view_as(factor).mul_(factor.pow(3)).div_(-x.shape[-1])
            grad_weight = factor.flatten() @ products if ctx.needs_input_grad[1] else None
        return (grad * weight).mul_(factor).addcmul_(x, shared), grad_weight, None
