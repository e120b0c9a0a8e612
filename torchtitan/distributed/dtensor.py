"""Telling DTensors apart without loading them, and computing with a rank's part of one."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor.

    Does not load DTensor's module, which takes a third as long as `import torch` and which a run
    of one process may not need: before someone loads it, there is no DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def load_dtensor(part: str = "") -> ModuleType:
    """The module `torch.distributed.tensor`, for functions that work on a DTensor or make one.

    part: of it, such as ".parallel". Slow the first time; see `is_dtensor`.
    """
    return importlib.import_module(f"torch.distributed.tensor{part}")


def local_shape_and_offsets(
    shape: torch.Size, mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What this rank holds of a DTensor of this shape, and where that begins."""
    utils = load_dtensor()._utils
    return utils.compute_local_shape_and_global_offset(shape, mesh, placements)


def whole_tensor(x: Tensor) -> Tensor:
    """`x` as a plain tensor; collective if it is a DTensor, which is then gathered."""
    return x.full_tensor() if is_dtensor(x) else x


def local_tensor(x: Tensor) -> Tensor:
    """This rank's part of `x` if it is a DTensor, sharing its memory; else `x`."""
    return x.to_local() if is_dtensor(x) else x


def local_parameter(parameter: Tensor | None, *, added_once: bool = False) -> Tensor | None:
    """This rank's part of a parameter, a plain tensor to compute with; unchanged if no DTensor.

    Where ranks hold the parameter whole, each uses it on its own tokens, heads or hidden units:
    the gradient is summed over these ranks.
    added_once: the parameter (a bias) is added to each summand of a sum over these ranks, so each
        rank gets 1 / ranks of it.
    """
    if not is_dtensor(parameter):
        return parameter
    local = parameter.to_local()
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            local = _SumGradient.apply(local, parameter.device_mesh.get_group(axis).group_name)
            if added_once:
                local = local / parameter.device_mesh.size(axis)
    return local


class _SumGradient(torch.autograd.Function):
    """The tensor itself; its gradient summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(grad.contiguous(), "sum", ctx.group)), None
