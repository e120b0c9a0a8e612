"""Recognising DTensors without importing them, and computing with a rank's part of a DTensor."""

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.distributed.collectives import Collective
from torchtitan.tools import torch_parts


def is_dtensor(x: Any) -> bool:
    """Return True if `x` is a DTensor. Avoids the slow import of DTensor: without the import none exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def load_dtensor(part: str = "") -> ModuleType:
    """Import `torch.distributed.tensor`, or its submodule `part`, such as ".parallel"."""
    return importlib.import_module(f"torch.distributed.tensor{part}")


def local_shape_and_offsets(
    shape: torch.Size, mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and where the part begins in the whole."""
    return torch_parts.local_shape_and_offset(shape, mesh, placements)


def own_slices(x: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that make up this rank's part of it."""
    shape, offsets = tuple(x.shape), (0,) * x.ndim
    if is_dtensor(x):
        shape, offsets = local_shape_and_offsets(x.shape, x.device_mesh, x.placements)
    return tuple(slice(offset, offset + n) for offset, n in zip(offsets, shape, strict=True))


class LocalShard(NamedTuple):
    """A block of a larger tensor of `shape`; the block begins at `offsets` (one per dim)."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def local_shard(tensor: Tensor) -> LocalShard | None:
    """Return this rank's part of a DTensor (None if it is empty), or the whole of a plain tensor."""
    if not is_dtensor(tensor):
        return LocalShard(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    local = tensor.to_local()
    if not local.numel():
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return LocalShard(local, tuple(chunk.offsets), tuple(tensor.shape))


def whole_tensor(x: Tensor) -> Tensor:
    """Return `x` as a plain tensor; gathers a DTensor, which is collective."""
    return x.full_tensor() if is_dtensor(x) else x


def with_local(x: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor with x's placements and the local tensor `local`; if x is plain, return `local`.

    If `local`'s last dim is n times that of x's local part, the result's last dim is n times that of x.
    """
    if not is_dtensor(x):
        return local
    shape, stride, own = x.shape, x.stride(), x.to_local().shape
    if local.shape[-1:] != own[-1:]:
        shape = torch.Size((*shape[:-1], shape[-1] * local.shape[-1] // own[-1]))
        stride = torch.empty(shape, device="meta").stride()
    return type(x).from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride
    )


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; a plain `x` is returned as it is."""
    return x.to_local() if is_dtensor(x) else x


def forget_scales(weights: Iterable[Tensor]) -> None:
    """Drop float8 scales computed by the last optimizer step. Call this after any other change of weights."""
    for weight in weights:
        # Not `to_local`, which returns a new object if the weight needs a gradient.
        stored = torch_parts.held_tensor(weight) if is_dtensor(weight) else weight
        if getattr(stored, "_precomputed_scale", None) is not None:
            stored._precomputed_scale = None


def local_parameter(parameter: Tensor | None, *, added_once: bool = False) -> Tensor | None:
    """Return this rank's part of a DTensor parameter as a plain tensor; other parameters unchanged.

    The gradient of a replicated parameter is summed over its ranks.
    added_once: divide a replicated parameter by the number of its ranks. This is for a bias that every
        rank adds to its partial sum.
    """
    if not is_dtensor(parameter):
        return parameter
    local = parameter.to_local()
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            group = parameter.device_mesh.get_group(axis).group_name
            local = Collective.apply("keep", "sum", local, group)
            if added_once:
                local = local / parameter.device_mesh.size(axis)
    return local
