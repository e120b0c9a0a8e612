"""Keeping hidden states spread over the ranks of a tensor-parallel mesh, by tokens.

Between the modules whose work is split over tp ranks, each rank holds the hidden states of its
own tokens (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198):

    whole    [B, T, M]
    a shard  [B, t, M], t = ceil(T / tp): rank r has the tokens from r * t on

Where tp does not divide T, the last shards end in rows of zeros. Norms and sums don't let them
influence any token, and gathering drops them.

Hidden states are plain tensors. There are two ways to make shards whole, by the gradient that will
come back. Inside a split module each rank's gradient is one summand of the whole one: `gather`.
Elsewhere (logits, the hand-over between pipeline stages) it is the whole one on every rank: `join`.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.collectives import start_all_gather, start_reduce_scatter

# Selective checkpointing and the compiler know collectives by these operators.
_OPS = torch.ops._c10d_functional


class WholeSequence:
    """Without tensor parallelism: hidden states are whole everywhere."""

    def gather(self, shard: Tensor, seq_len: int) -> Tensor:
        return shard

    def reduce(self, partial_sum: Tensor) -> Tensor:
        return partial_sum

    def split(self, whole: Tensor) -> Tensor:
        return whole

    def join(self, shard: Tensor, seq_len: int) -> Tensor:
        return shard


class SequenceShards:
    """The four ways between shards and whole hidden states on a one-dimensional mesh.

    overlap: gather and reduce in the one form that the compiler's pass for asynchronous tensor
        parallelism recognises beside a matrix product. The results are the same.

    Every rank of the mesh has to make the same calls, in the same order, in backward too.
    """

    def __init__(self, mesh: DeviceMesh, overlap: bool = False):
        self._ranks = (mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), overlap)

    def gather(self, shard: Tensor, seq_len: int) -> Tensor:
        """[B, t, M] -> [B, T, M] for a module whose work is split: gradients are summed."""
        return _Move.apply("all_gather", "reduce_scatter", shard, 1, seq_len, *self._ranks)

    def reduce(self, partial_sum: Tensor) -> Tensor:
        """[B, T, M], one summand on each rank -> this rank's rows [B, t, M] of the sum."""
        seq_len = partial_sum.shape[1]
        return _Move.apply("reduce_scatter", "all_gather", partial_sum, 1, seq_len, *self._ranks)

    def split(self, whole: Tensor) -> Tensor:
        """[B, T, M], the same on every rank -> this rank's rows [B, t, M]."""
        return _Move.apply("own_rows", "all_gather", whole, 1, whole.shape[1], *self._ranks)

    def join(self, shard: Tensor, seq_len: int) -> Tensor:
        """[B, t, M] -> [B, T, M] where every rank's gradient will be the whole one."""
        return join_shards(shard, 1, seq_len, *self._ranks)


def join_shards(
    shard: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool = False
) -> Tensor:
    """All ranks' shards along `dim`, cut to `length`; every rank's gradient is the whole one."""
    return _Move.apply("all_gather", "own_rows", shard, dim, length, group, size, rank, overlap)


class _Move(torch.autograd.Function):
    """One of `_MOVES` between shards and whole tensors, with another one for the gradient.

    dim: which is split. length: of the whole tensor along it.
    """

    @staticmethod
    def forward(ctx: Any, move: str, back: str, x: Tensor, *where: Any) -> Tensor:
        ctx.back, ctx.where = back, where
        return _MOVES[move](x, *where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, None, _MOVES[ctx.back](grad, *ctx.where), *[None] * len(ctx.where)


def all_gather(
    shard: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    if overlap:
        gathered = _OPS.wait_tensor(_OPS.all_gather_into_tensor(shard.contiguous(), size, group))
        whole = torch.cat(gathered.chunk(size), dim)
        # Cutting to the same length would be right too, but then products could not begin before
        # all rows are there.
        return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length)
    gathered = _OPS.wait_tensor(start_all_gather(shard, size, group))
    # [tp * B, ..., t, ...] -> [B, ..., tp, t, ...] -> [B, ..., tp * t, ...]; no copy for one row.
    by_rank = gathered.unflatten(0, (size, -1)).movedim(0, dim)
    return by_rank.flatten(dim, dim + 1).narrow(dim, 0, length)


def reduce_scatter(
    partial_sum: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    padded = _pad(partial_sum, dim, size)
    if overlap:
        by_rank = torch.cat(padded.chunk(size, dim))
        return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(by_rank, "sum", size, group))
    by_rank = padded.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
    return _OPS.wait_tensor(start_reduce_scatter(by_rank, size, group))


def _own_rows(
    whole: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool
) -> Tensor:
    padded = _pad(whole, dim, size)
    n_rows = padded.shape[dim] // size
    # A view would keep the whole tensor alive.
    return padded.narrow(dim, rank * n_rows, n_rows).clone(memory_format=torch.contiguous_format)


_MOVES = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "own_rows": _own_rows}


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros at the end of `dim`, so that `size` divides it."""
    missing = -x.shape[dim] % size
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
