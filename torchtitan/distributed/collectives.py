"""Collectives that take less CPU time than gloo's own, and the exchange of rows with gradients.

For some MB gloo's all-gather takes twice the CPU time of a broadcast from each rank, and its
reduce-scatter twice that of an all-to-all with a sum (torch 2.13, 2 and 4 ranks of one host); fewer or
as many bytes are sent. docs/layouts.md has the figures.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor, library

# Selective checkpointing and the compiler know collectives by these operators.
_OPS = torch.ops._c10d_functional

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("all_gather(Tensor x, int size, str group) -> Tensor")
_library.define("reduce_scatter(Tensor x, int size, str group) -> Tensor")


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """x [sum of sent, ...], in the order of ranks -> [sum of received, ...]."""
    return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), received, sent, group))


def start_all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """x [n, ...] of each rank -> [size * n, ...], in the order of ranks.

    Call `wait_tensor` on the result before it is read. On the CPU it is there already, and waiting
    does nothing.
    """
    if x.device.type != "cpu":
        return _OPS.all_gather_into_tensor(x.contiguous(), size, group)
    return torch.ops.torchtitan.all_gather(x, size, group)


def start_reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """x [size * n, ...], a summand for each rank -> this rank's sum [n, ...].

    Call `wait_tensor` on the result before it is read, as on `start_all_gather`'s.
    """
    if x.device.type != "cpu":
        return _OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return torch.ops.torchtitan.reduce_scatter(x, size, group)


@library.impl(_library, "all_gather", "CPU")
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if not is_gloo(process_group):
        return _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), size, group))
    gathered = x.new_empty((size, *x.shape))
    gathered[process_group.rank()] = x
    broadcast_all(gathered, process_group)
    return gathered.flatten(0, 1)


@library.impl(_library, "reduce_scatter", "CPU")
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """One operator, so that selective checkpointing keeps the sum and not its `size` summands."""
    out = x.new_empty((len(x) // size, *x.shape[1:]))
    sum_over_ranks(x.contiguous(), dist.distributed_c10d._resolve_process_group(group), out)
    return out


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU go by gloo."""
    return group._get_backend(torch.device("cpu")).name() == "gloo"


def broadcast_all(by_rank: Tensor, group: dist.ProcessGroup) -> None:
    """Each rank sends its own entry of `by_rank` [size, ...] to all others, in place."""
    works = [
        dist.broadcast(entry, group=group, group_src=rank, async_op=True)
        for rank, entry in enumerate(by_rank)
    ]
    for work in works:
        work.wait()


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, out: Tensor) -> None:
    """x [size * n, ...], a summand for each rank -> this rank's sum in `out` [n, ...]."""
    summands = torch.empty_like(x)
    dist.all_to_all_single(summands, x, group=group)
    torch.sum(summands.view(group.size(), *out.shape), 0, out=out)


_library.impl(
    "all_gather", lambda x, size, group: x.new_empty((len(x) * size, *x.shape[1:])), "Meta"
)
_library.impl(
    "reduce_scatter", lambda x, size, group: x.new_empty((len(x) // size, *x.shape[1:])), "Meta"
)


class AllToAll(torch.autograd.Function):
    """`all_to_all`, whose gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], group: str
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None
