"""Rows that every rank sends to every other one, with gradients, and sums of such rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor, library

# Selective checkpointing and the compiler know collectives by these operators.
_OPS = torch.ops._c10d_functional

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("reduce_scatter(Tensor x, int size, str group) -> Tensor")


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """x [sum of sent, ...], in the order of ranks -> [sum of received, ...]."""
    return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), received, sent, group))


def start_reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """x [size * n, ...], a summand for each rank -> this rank's sum [n, ...].

    Call `wait_tensor` on the result before it is read. On the CPU it is there already, and waiting
    does nothing.
    """
    if x.device.type != "cpu":
        return _OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return torch.ops.torchtitan.reduce_scatter(x, size, group)


def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """By all-to-all and a sum, since gloo's own takes twice the CPU time.

    One operator, so that selective checkpointing keeps the sum and not its `size` summands.
    """
    one_each = [len(x) // size] * size
    return all_to_all(x, one_each, one_each, group).unflatten(0, (size, one_each[0])).sum(0)


_library.impl("reduce_scatter", _reduce_scatter, "CPU")
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
