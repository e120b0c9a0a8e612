"""Products of fp32 matrices by oneDNN, on CPUs where it is faster than MKL.

On an AMD EPYC with AVX-512 a training step takes 27 % less time (models of 6 and 100 million
parameters); with a transposed first matrix, as for a weight's gradient, oneDNN is no faster. The choice
depends only on the CPU's maker and on shapes, so the same product always rounds in the same way.
Only our own layers use oneDNN; all other products of the process run as torch chooses.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, library, nn

from torchtitan.tools import host, torch_parts

# For smaller products the call costs more than oneDNN gains.
_LEAST_MULTIPLICATIONS = 2**24
_LEAST_OF_ADAPTERS = 2**22  # less than above: MKL is slow if a matrix has few rows
_FEW_ROWS = 256  # tokens of a small training step

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("mm(Tensor a, Tensor b) -> Tensor")


@functools.cache
def onednn_is_faster() -> bool:
    """Return True if torch has both oneDNN and MKL, and oneDNN is faster on this CPU."""
    cpu = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpus:
        cpu = cpus.read(4096)
    return (
        "AuthenticAMD" in cpu
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.enabled
        and bool(torch_parts.onednn_linear)
    )


def use_onednn(model: nn.Module, device: torch.device) -> None:
    """Let our layers use oneDNN until the engine is closed, if it is faster and some product is large."""
    if device.type != "cpu":
        return
    largest = max((p.numel() for p in model.parameters()), default=0)
    if largest * _FEW_ROWS >= _LEAST_MULTIPLICATIONS and onednn_is_faster():
        host.change(True, _use, lambda: _is_used)


def avoid_onednn() -> None:
    """Undo `use_onednn` until the engine is closed, for batches with rows of several models.

    oneDNN is chosen by the number of rows, so one model's rows could change the rounding of other models.
    """
    host.change(False, _use, lambda: _is_used)


def is_used(a: Tensor, b: Tensor) -> bool:
    """Return True if `use_onednn` is on, and the product of a [..., K] and the matrix b is large enough.

    Compiled code, subclasses of Tensor and autocast use torch's operators.
    """
    return (
        not torch.compiler.is_compiling()
        and _is_used
        and a.device.type == "cpu"
        and a.numel() // max(a.shape[-1], 1) * b.numel() >= _LEAST_MULTIPLICATIONS
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and not torch.is_autocast_enabled("cpu")
    )


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm`: a [M, K] times b [K, N]."""
    return torch.ops.torchtitan.mm(a, b) if is_used(a, b) else torch.mm(a, b)


def mm_of_few_rows(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of a [..., M, K] and b [..., K, N], for a small M such as an adapter's rank. No autograd.

    oneDNN takes half the time of MKL (rank 16, 1,024 tokens).
    """
    is_transposed = b.mT.is_contiguous()
    if not (
        _is_used
        and a.dim() == 2
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and len(a) * b.numel() >= _LEAST_OF_ADAPTERS
        and (is_transposed or b.is_contiguous())
    ):
        return a @ b
    multiply = torch_parts.onednn_linear.default
    if is_transposed:  # rows of b.t() are contiguous
        return multiply(b.t(), a, *_NOTHING_ELSE).t()
    return multiply(a, b.t(), *_NOTHING_ELSE)


def compile_options() -> dict[str, Any] | None:
    """Return inductor's options for oneDNN; None if MKL is as fast, or inductor already has a custom pass."""
    if not onednn_is_faster() or torch_parts.inductor_config.post_grad_custom_post_pass is not None:
        return None
    return {"post_grad_custom_post_pass": _own_mm_pass()}


@functools.cache
def _own_mm_pass() -> Any:
    """Return a compiler pass to our mm; cached, because torch.compile shares code only for equal options."""

    class UseOwnMm(torch_parts.GraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                if node.meta["val"].device.type == "cpu":
                    node.target = torch.ops.torchtitan.mm.default

        def uuid(self) -> str:
            return "torchtitan::mm for aten::mm"  # inductor's cache key contains this string

    return UseOwnMm()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N]."""
    if (
        a.dtype == b.dtype == torch.float32
        and a.dim() == b.dim() == 2
        and a.shape[0] > 1
        and a.shape[0] * b.numel() >= _LEAST_MULTIPLICATIONS
        and a.stride(1) == 1
        and a.shape[1] == b.shape[0]
        # Other layouts have overlapping rows, which oneDNN refuses, or are rare.
        and (b.is_contiguous() or b.t().is_contiguous())
    ):
        return torch_parts.onednn_linear.default(a, b.t(), *_NOTHING_ELSE)
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(0))


_library.impl("mm", _mm, "CPU")
_library.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    # oneDNN is no faster with a transposed first matrix, as in b's gradient.
    return (
        torch.ops.torchtitan.mm(grad, b.t()) if ctx.needs_input_grad[0] else None,
        torch.mm(a.t(), grad) if ctx.needs_input_grad[1] else None,
    )


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    a, b = inputs
    needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


library.register_autograd("torchtitan::mm", _backward, setup_context=_save, lib=_library)

_PLAIN = (Tensor, nn.Parameter)
_NOTHING_ELSE: Any = (None, "none", [], "")  # no bias and no activation function
_is_used = False


def _use(is_used: bool) -> None:
    global _is_used
    _is_used = is_used
