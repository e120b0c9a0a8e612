"""Products of bf16 matrices that are fast on every CPU.

On CPUs without bf16 instructions torch 2.13 multiplies bf16 matrices ten to a hundred times slower
than fp32 matrices. There the product is computed in fp32 and rounded once, as bf16 instructions do.
"""

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.numerics import products
from torchtitan.tools import torch_parts

# Set when the first Linear is built, because code that is being compiled cannot query the CPU.
_cpu_multiplies_bf16: bool | None = None


def cpu_multiplies_bf16() -> bool:
    """Return True if this CPU has instructions for products of bf16 matrices."""
    global _cpu_multiplies_bf16
    if _cpu_multiplies_bf16 is None:
        if platform.machine().lower() in ("x86_64", "amd64"):
            cpu = torch.cpu.get_capabilities()
            answer = cpu["avx512_bf16"] or cpu["amx_tile"]
        else:
            # Builds of torch without oneDNN, as for macOS, lack this operator and bf16 products.
            operator = torch_parts.onednn_has_bf16
            answer = torch.backends.mkldnn.is_available() and operator is not None and operator()
        _cpu_multiplies_bf16 = answer
    return _cpu_multiplies_bf16


def is_slow_product(x: Tensor) -> bool:
    """Return True if a product with x is in bf16, and this CPU is slow at bf16 products."""
    if x.device.type != "cpu" or _cpu_multiplies_bf16 is not False:
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype == torch.bfloat16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., K] times weight [M, K] transposed, plus bias [M]. See `nf4` for a uint8 weight."""
    if weight.dtype == torch.uint8:
        has_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if has_autocast else x.dtype
        product = torch.ops.torchtitan.nf4_mm(x.to(dtype), weight, None, False)
        return product if bias is None else product + bias.to(dtype)
    if not is_slow_product(x):
        if bias is None and x.dim() > 1 and products.is_used(x, weight):
            product = torch.ops.torchtitan.mm(x.flatten(0, -2), weight.t())
            return product.view(*x.shape[:-1], len(weight))
        return F.linear(x, weight, bias)
    rounded = [None if t is None else t.to(torch.bfloat16) for t in (x, weight, bias)]
    return _RoundedLinear.apply(*rounded)


def project(
    head: Callable[..., Any] | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    product: Callable[..., Tensor] = linear,
    in_fp32: bool,
    low_rank: Callable[[Tensor], Any] | None = None,
    cap: float | None = None,
) -> Any:
    """Return `head(x, weight, bias)`, or `product(x, weight, bias)` if head is None.

    in_fp32: compute with fp32 copies of the arguments, without autocast.
    low_rank: x -> an adapter with the method `add_to_layer`, or None; a head gets the adapter as `low_rank`.
    cap: c, for results c * tanh(result / c); a head gets it as `cap`.
    """

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        adapter = None if low_rank is None else low_rank(x)
        if head is not None:
            added = {} if adapter is None else {"low_rank": adapter}
            added |= {} if cap is None else {"cap": cap}
            return head(x, weight, bias, **added)
        out = (product if adapter is None else adapter.add_to_layer)(x, weight, bias)
        return cap_logits(out, cap)

    if not in_fp32:
        return compute(x, weight, bias)
    operands = [
        None if t is None else t.to(torch.promote_types(t.dtype, torch.float32))
        for t in (x, weight, bias)
    ]
    with torch.autocast(x.device.type, enabled=False):
        return compute(*operands)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else (logits / cap).tanh() * cap


class Linear(nn.Linear):
    """`nn.Linear`, computed by `product`. low_rank: (this module, x) -> an adapter as in `project`."""

    product: Callable[..., Tensor] = staticmethod(linear)
    low_rank: Callable[..., Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        cpu_multiplies_bf16()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.bias)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's result for this weight and bias, which may be a rank's shards."""
        adapter = None if self.low_rank is None else self.low_rank(self, x)
        return (self.product if adapter is None else adapter.add_to_layer)(x, weight, bias)


class _RoundedLinear(torch.autograd.Function):
    """`F.linear` of bf16 tensors and its gradients, computed in fp32 and rounded once.

    Autocast is off inside, because the compiler would apply it to backward, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            fp32_bias = None if bias is None else bias.float()
            return F.linear(x.float(), weight.float(), fp32_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.autocast("cpu", enabled=False):
            grad = grad.float()
            rows = grad.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                grad_x = (grad @ weight.float()).to(x.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (rows.t() @ x.flatten(0, -2).float()).to(x.dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(x.dtype)
        return grad_x, grad_weight, grad_bias
