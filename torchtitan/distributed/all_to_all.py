"""Rows that every rank sends to every other one, with gradients, and sums of such rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor

# Selective checkpointing and the compiler know collectives by these operators.
_OPS = torch.ops._c10d_functional


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """x [sum of sent, ...], in the order of ranks -> [sum of received, ...]."""
    return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), received, sent, group))


def start_reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """x [size * n, ...], a summand for each rank -> this rank's sum [n, ...].

    Wait for the result with `wait_tensor`.
    """
    if x.device.type != "cpu":
        return _OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    # Gloo's own takes twice the CPU time.
    one_each = [len(x) // size] * size
    return all_to_all(x, one_each, one_each, group).unflatten(0, (size, -1)).sum(0)


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
