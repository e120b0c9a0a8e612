"""The gated delta rule by flash-linear-attention (the extra `fla`), on CUDA in 16 bits.

Its kernels take one row of N tokens and its document boundaries, and start a chunk with each document, so
they mix no documents. N packed tokens; see `numerics.delta_rule` for the other letters.
"""

from importlib.util import find_spec

import torch
from torch import Tensor, library

_LARGEST_HEAD = 256  # fla's kernels refuse larger key heads

_library = library.Library("torchtitan", "FRAGMENT")
_library.define(
    "fla_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens) -> Tensor"
)
_library.define(
    "fla_gated_delta_rule_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,"
    " Tensor cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


# Looked up on import: inside a function, the compiler would trace the look-up.
_IS_INSTALLED = find_spec("fla") is not None


def is_available(device: torch.device) -> bool:
    """Return True if fla is installed and computes on the device."""
    return device.type == "cuda" and _IS_INSTALLED


def is_supported(q: Tensor, v: Tensor) -> bool:
    """Return True if fla is installed and computes heads like q [..., Dk] and v [..., Dv] on their device."""
    return (
        q.dtype.itemsize == 2
        and q.shape[-1] <= _LARGEST_HEAD
        and q.shape[-1] % 2 == v.shape[-1] % 2 == 0
        and is_available(q.device)
    )


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return the outputs [B, T, Hv, Dv]; see `delta_rule.gated_delta_rule`.

    cu_seqlens: int [documents + 1], from 0 to B * T; no document is empty or crosses the end of a row.
    Compiled code calls an operator whose backward computes the forward again, because fla's own function
    breaks the graph.
    """
    inputs = (*(x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta)), cu_seqlens)
    compute = torch.ops.torchtitan.fla_gated_delta_rule if torch.compiler.is_compiling() else _call
    return compute(*inputs).view(v.shape)


def _call(*inputs: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta, cu_seqlens = inputs
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}
    return chunk_gated_delta_rule(q, k, v, g.float(), beta, q.shape[-1] ** -0.5, **options)[0]


def _backward(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    *tensors, cu_seqlens = inputs
    with torch.enable_grad():
        tensors = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(_call(*tensors, cu_seqlens), tensors, grad)


_library.impl("fla_gated_delta_rule", _call, "CompositeExplicitAutograd")
_library.impl("fla_gated_delta_rule", lambda q, k, v, *_: v.new_empty(v.shape), "Meta")
_library.impl("fla_gated_delta_rule_backward", _backward, "CompositeExplicitAutograd")
_library.impl(
    "fla_gated_delta_rule_backward",
    lambda grad, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:5]),
    "Meta",
)
library.register_autograd(
    "torchtitan::fla_gated_delta_rule",
    lambda ctx, grad: (
        *torch.ops.torchtitan.fla_gated_delta_rule_backward(grad, *ctx.saved_tensors),
        None,
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_library,
)
