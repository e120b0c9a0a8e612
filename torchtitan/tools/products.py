"""Products of fp32 matrices by oneDNN, on CPUs where it is faster than MKL.

On an AMD EPYC with AVX-512, oneDNN multiplies by a weight 1.1 times as fast with one thread and 1.25
times with two; by a first matrix that is transposed, as for a weight's gradient, it is no faster.
The choice goes by the CPU's maker and by shapes: on one machine the same product always rounds in
the same way while an engine lives.
"""

import contextlib
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, library, nn

from torchtitan.tools import host
from torchtitan.tools.compiler import load_inductor

# Below, a call takes longer than the product gains.
_LEAST_MULTIPLICATIONS = 2**24
_FEW_ROWS = 256  # of a training step

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("mm(Tensor a, Tensor b) -> Tensor")


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this CPU is such a one, and torch has both libraries."""
    cpu = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpus:
        cpu = cpus.read(4096)
    return (
        "AuthenticAMD" in cpu
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def use_onednn(model: nn.Module, device: torch.device) -> None:
    """Have `torch.mm` of this process use oneDNN where that is faster, on loan.

    Not for a model on another device, nor for one whose products are all small, since each call
    takes 4 microseconds more. Code that is compiled uses oneDNN with `compile_options`.
    """
    if device.type != "cpu":
        return
    largest = max((p.numel() for p in model.parameters()), default=0)
    if largest * _FEW_ROWS >= _LEAST_MULTIPLICATIONS and onednn_is_faster():
        host.change(True, _replace_mm, lambda: _replacement is not None)


def compile_options() -> dict[str, Any] | None:
    """Options of `torch.compile` with inductor; None where MKL is as fast.

    None also where inductor's place for a pass is taken.
    """
    if not onednn_is_faster() or load_inductor().config.post_grad_custom_post_pass is not None:
        return None
    return {"post_grad_custom_post_pass": _own_mm_pass()}


@functools.cache
def _own_mm_pass() -> Any:
    """One for all engines: torch.compile shares code among those with equal options."""

    class UseOwnMm(load_inductor().custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                if node.meta["val"].device.type == "cpu":
                    node.target = torch.ops.torchtitan.mm.default

        def uuid(self) -> str:
            return "torchtitan::mm for aten::mm"  # names the pass in inductor's cache

    return UseOwnMm()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N]."""
    if (
        a.dtype == b.dtype == torch.float32
        and a.dim() == b.dim() == 2
        and len(a) > 1
        and len(a) * b.numel() >= _LEAST_MULTIPLICATIONS
        and a.stride(1) == 1
        and a.shape[1] == len(b)
        # Others have rows that overlap, which oneDNN refuses, or are rare.
        and (b.is_contiguous() or b.t().is_contiguous())
    ):
        return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(0))


_library.impl("mm", _mm, "CPU")
_library.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")

_replacement: library.Library | None = None


def _replace_mm(replaced: bool) -> None:
    global _replacement
    if _replacement is not None and not replaced:
        _replacement._destroy()
        _replacement = None
    elif _replacement is None and replaced:
        _replacement = library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            _replacement.impl("mm", _mm, "CPU")
