"""Splits and joins stacked weights, plain or DTensors, without copies, for `hf_adapter`.

Hugging Face files hold one matrix per expert, or several of our tensors joined into one. Views share the
memory of our parameters, so reading a file into a view fills the parameter. Each rank handles only its own
shard. E experts, R rows, C columns.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.distributed.dtensor import (
    LocalShard,
    is_dtensor,
    load_dtensor,
    local_shape_and_offsets,
    local_tensor,
)


class StackLayout(NamedTuple):
    """The layout of a DTensor [E, R, C]. rows: the indices along E that this rank holds."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rows: range


def unstack(stacked: Tensor) -> tuple[dict[int, Tensor], StackLayout | None]:
    """Return index -> view [R, C] of this rank's matrices of [E, R, C], and the layout for `stack`.

    Views are DTensors on the mesh axes that shard R or C, if any. A plain tensor has no layout.
    """
    if not is_dtensor(stacked):
        return dict(enumerate(stacked.unbind(0))), None
    (chunk,) = stacked.__create_chunk_list__()
    local = stacked.to_local()
    first, count = chunk.offsets[0], local.shape[0]
    layout = StackLayout(
        stacked.device_mesh,
        stacked.placements,
        stacked.shape,
        stacked.dtype,
        local.device,
        range(first, first + count),
    )
    inner = [
        axis for axis, p in enumerate(stacked.placements) if not p.is_replicate() and p.dim != 0
    ]
    entries = dict(zip(layout.rows, local.unbind(0), strict=True))
    if not inner:
        return entries, layout
    mesh = stacked.device_mesh
    if len(inner) < mesh.ndim:
        mesh = mesh[tuple(mesh.mesh_dim_names[axis] for axis in inner)]
    placements = [stacked.placements[axis] for axis in inner]
    placements = [_on_dim(placement, placement.dim - 1) for placement in placements]
    shape = stacked.shape[1:]
    return {n: _from_local(view, mesh, placements, shape) for n, view in entries.items()}, layout


def stack(entries: dict[int, Tensor], layout: StackLayout | None, name: str) -> Tensor:
    """The inverse of `unstack`; returns a view if the entries are views. ValueError if entries are missing."""
    numbers = sorted(entries)
    is_sharded = layout is not None and numbers == list(layout.rows)
    if not is_sharded and numbers != list(range(len(numbers))):
        missing = sorted(set(range(numbers[-1])) - set(numbers))
        raise ValueError(f"{name} is stacked from numbered tensors, but {missing} are missing")
    tensors = [entries[n] for n in numbers]
    if not is_sharded:
        return _stack_plain(tensors)
    mesh, placements = layout.mesh, layout.placements
    if tensors:
        local = _stack_plain([local_tensor(tensor) for tensor in tensors])
    else:
        shape, _ = local_shape_and_offsets(layout.shape, mesh, placements)
        local = torch.empty(shape, dtype=layout.dtype, device=layout.device)
    return _from_local(local, mesh, placements, layout.shape)


def join_rows(tensors: Sequence[Tensor], n_groups: int = 1) -> Tensor:
    """Join tensors [..., R, C] into [..., sum of R, C]; a copy, unless there is only one tensor.

    n_groups: each tensor's rows are cut into n_groups parts; part 0 of all tensors precedes part 1, ...
    """
    if len(tensors) == 1:
        return tensors[0]
    dim = _row_dim(tensors[0].ndim)

    def join(*local: Tensor) -> Tensor:
        groups = [tensor.unflatten(dim, (n_groups, -1)) for tensor in local]
        return torch.cat(groups, dim=dim + 1).flatten(dim, dim + 1)

    return _along_rows(tensors[0], join, *tensors)


def split_rows(joined: Tensor, rows: Sequence[int], n_groups: int = 1) -> list[Tensor]:
    """The inverse of `join_rows`; returns views, unless the rows are sharded or in groups.

    rows: the proportions of the tensors' row counts.
    """
    if len(rows) == 1:
        return [joined]
    dim = _row_dim(joined.ndim)
    unit = joined.shape[dim] // n_groups // sum(rows)
    sizes = [unit * n for n in rows]

    def split(local: Tensor, part: int) -> Tensor:
        groups = local.unflatten(dim, (n_groups, -1))
        return groups.split(sizes, dim=dim + 1)[part].flatten(dim, dim + 1)

    return [_along_rows(joined, partial(split, part=part), joined) for part in range(len(rows))]


def as_parts_of_rows(
    shard: LocalShard, part: int, rows: Sequence[int], n_groups: int = 1
) -> Iterator[LocalShard]:
    """Yield a shard of the `part`-th tensor [..., R, C] as shards of the `join_rows` result."""
    dim = _row_dim(len(shard.shape))
    own = shard.shape[dim] // n_groups  # rows of this tensor in a group
    unit = own // rows[part]
    first, before, of_all = shard.offsets[dim], unit * sum(rows[:part]), unit * sum(rows)
    end = first + shard.tensor.shape[dim]
    for group in range(first // own, -(-end // own)):
        begin, stop = max(first, group * own), min(end, (group + 1) * own)
        offsets, shape = list(shard.offsets), list(shard.shape)
        offsets[dim] = group * of_all + before + begin - group * own
        shape[dim] = n_groups * of_all
        tensor = shard.tensor.narrow(dim, begin - first, stop - begin)
        yield LocalShard(tensor, tuple(offsets), tuple(shape))


def transposed_shard(shard: LocalShard) -> LocalShard:
    """Return a shard of [..., R, C] as a shard of the transposed tensor [..., C, R]."""
    *outer, row, column = shard.offsets
    *outer_sizes, n_rows, n_columns = shard.shape
    swapped = shard.tensor.transpose(-2, -1)
    return LocalShard(swapped, (*outer, column, row), (*outer_sizes, n_columns, n_rows))


def shard_with_middle(shard: LocalShard) -> LocalShard:
    """Return a shard of [R, C] as a shard of [R, 1, C]."""
    (n_rows, n_columns), (row, column) = shard.shape, shard.offsets
    return LocalShard(shard.tensor.unsqueeze(1), (row, 0, column), (n_rows, 1, n_columns))


def unstacked_shards(shard: LocalShard) -> dict[int, LocalShard]:
    """Return the shard of each matrix of a stack: index along dim 0 -> shard [R, C]."""
    views = enumerate(shard.tensor.unbind(0), start=shard.offsets[0])
    return {n: LocalShard(view, shard.offsets[1:], shard.shape[1:]) for n, view in views}


def _row_dim(ndim: int) -> int:
    """Return the dim of rows: the second last for weights, the only one for biases."""
    return max(ndim - 2, 0)


def _along_rows(like: Tensor, change: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `change` to the local tensors, sharded as `like`; gathers the rows first if they are sharded."""
    if not is_dtensor(like):
        return change(*tensors)
    dim, whole = _row_dim(like.ndim), load_dtensor().Replicate()
    placements = [p if p.is_replicate() or p.dim != dim else whole for p in like.placements]
    local = change(*(t.redistribute(placements=placements).to_local() for t in tensors))
    shape = torch.Size((*like.shape[:dim], local.shape[dim], *like.shape[dim + 1 :]))
    return _from_local(local, like.device_mesh, placements, shape)


def _stack_plain(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    offsets = [t.storage_offset() for t in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else first.numel()
    is_one_block = all(
        tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() != 0
        and (tensor.shape, tensor.stride(), tensor.dtype)
        == (first.shape, first.stride(), first.dtype)
        and offset == offsets[0] + step * n
        for n, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True))
    )
    if not is_one_block or step <= 0:
        return torch.stack(tensors)
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def _from_local(local: Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size) -> Tensor:
    """Return a contiguous DTensor of global `shape`, which can't be inferred from uneven shards."""
    stride = torch.empty(shape, device="meta").stride()
    return load_dtensor().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _on_dim(placement: Any, dim: int) -> Any:
    """Return the same kind of shard placement (strided or not) along another dim."""
    if placement.dim == dim:
        return placement
    split_factor = getattr(placement, "split_factor", None)
    kind = type(placement)
    return kind(dim) if split_factor is None else kind(dim, split_factor=split_factor)
