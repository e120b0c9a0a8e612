"""Collectives with gradients, and collectives that take less CPU time than gloo's own.

For a few MB, gloo's all-gather takes twice the CPU time of a broadcast from each rank, and gloo's
reduce-scatter twice the time of an all-to-all followed by a sum (torch 2.13, 2 and 4 ranks on one
host). The replacements send no more bytes. docs/measured.md has the figures.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library

from torchtitan.tools import torch_parts

# Selective checkpointing and the compiler recognise collectives by these operators.
OPS = torch_parts.collective_operators

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("all_gather(Tensor x, int size, str group) -> Tensor")
_library.define("reduce_scatter(Tensor x, int size, str group) -> Tensor")


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """All-to-all of x's rows, in rank order; received, sent: the numbers of rows from and to each rank."""
    return OPS.wait_tensor(OPS.all_to_all_single(x.contiguous(), received, sent, group))


def start_all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Gather x [n, ...] of every rank into [size * n, ...], in rank order; complete it with `wait_tensor`."""
    if x.device.type != "cpu":
        return OPS.all_gather_into_tensor(x.contiguous(), size, group)
    return torch.ops.torchtitan.all_gather(x, size, group)


def start_reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum x [size * n, ...] over ranks; returns this rank's part [n, ...]. Complete it with `wait_tensor`."""
    if x.device.type != "cpu":
        return OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return torch.ops.torchtitan.reduce_scatter(x, size, group)


@library.impl(_library, "all_gather", "CPU")
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    process_group = torch_parts.group_of_name(group)
    gathered = x.new_empty((size, *x.shape))
    gathered[process_group.rank()] = x
    broadcast_all(gathered, process_group)
    return gathered.flatten(0, 1)


@library.impl(_library, "reduce_scatter", "CPU")
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return this rank's part of the sum; one operator, so selective checkpointing keeps no summands."""
    out = x.new_empty((len(x) // size, *x.shape[1:]))
    sum_over_ranks(x.contiguous(), torch_parts.group_of_name(group), out)
    return out


def broadcast_all(by_rank: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather in place: each rank broadcasts its own entry of `by_rank` [size, ...]."""
    works = [
        dist.broadcast(entry, group=group, group_src=rank, async_op=True)
        for rank, entry in enumerate(by_rank)
    ]
    for work in works:
        work.wait()


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, out: Tensor) -> None:
    """Sum x [size * n, ...] over ranks, and write this rank's part of the sum to `out` [n, ...]."""
    summands = torch.empty_like(x)
    dist.all_to_all_single(summands, x, group=group)
    torch.sum(summands.view(group.size(), *out.shape), 0, out=out)


_library.impl(
    "all_gather", lambda x, size, group: x.new_empty((len(x) * size, *x.shape[1:])), "Meta"
)
_library.impl(
    "reduce_scatter", lambda x, size, group: x.new_empty((len(x) // size, *x.shape[1:])), "Meta"
)


# ---- along a dimension that is split over ranks ----


def all_gather(
    shard: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    if overlap:
        gathered = OPS.wait_tensor(OPS.all_gather_into_tensor(shard.contiguous(), size, group))
        whole = torch.cat(gathered.chunk(size), dim)
        # Skip a `narrow` to the full length: after a `narrow` the compiler does not recognise an all-gather
        # before a matmul, and cannot overlap the two.
        return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length)
    gathered = OPS.wait_tensor(start_all_gather(shard, size, group))
    # [tp * B, ..., t, ...] -> [B, ..., tp, t, ...] -> [B, ..., tp * t, ...]; no copy if B is 1.
    by_rank = gathered.unflatten(0, (size, -1)).movedim(0, dim)
    return by_rank.flatten(dim, dim + 1).narrow(dim, 0, length)


def reduce_scatter(
    partial_sum: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    padded = _pad(partial_sum, dim, size)
    if overlap:
        by_rank = torch.cat(padded.chunk(size, dim))
        return OPS.wait_tensor(OPS.reduce_scatter_tensor(by_rank, "sum", size, group))
    by_rank = padded.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
    return OPS.wait_tensor(start_reduce_scatter(by_rank, size, group))


def _own_rows(
    whole: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    padded = _pad(whole, dim, size)
    n_rows = padded.shape[dim] // size
    # Copy, because a view would keep the whole tensor alive.
    return padded.narrow(dim, rank * n_rows, n_rows).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros along `dim` until `size` divides it."""
    missing = -x.shape[dim] % size
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


# ---- with gradients ----

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "own_rows": _own_rows,
    "sum": lambda x, group: OPS.wait_tensor(OPS.all_reduce(x.contiguous(), "sum", group)),
    # Completes a collective that was started earlier.
    "wait": OPS.wait_tensor,
    "keep": lambda x, *_: x.view_as(x),
}


class Collective(torch.autograd.Function):
    """Apply OPERATIONS[forward] to x, and in backward OPERATIONS[backward] to the result's gradient."""

    @staticmethod
    def forward(ctx: Any, forward: str, backward: str, x: Tensor, *where: Any) -> Tensor:
        ctx.operation, ctx.where = backward, where
        return OPERATIONS[forward](x, *where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad = OPERATIONS[ctx.operation](grad, *ctx.where)
        return None, None, grad, *[None] * len(ctx.where)


class AllToAll(torch.autograd.Function):
    """`all_to_all` with a backward, which sends gradients to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], group: str
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None
