"""Sequence parallelism: hidden states spread by tokens over the ranks of a tensor-parallel mesh.

Between the modules whose work is split over tp ranks, each rank holds the hidden states of its
own tokens (Korthikanti et al. 2022, arXiv:2205.05198):

    whole    [B, T, M]
    a shard  [B, t, M], t = ceil(T / tp): rank r has the tokens from r * t on

If tp does not divide T, the last shards end in rows of zeros, which `gather` and `join` drop. Use
`gather` in a split module, where each rank's gradient is one summand of the whole gradient, and `join`
elsewhere (logits, pipeline stages), where every rank has the whole gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.collectives import OPS, start_all_gather, start_reduce_scatter


class WholeSequence:
    """The interface of `SequenceShards` without tensor parallelism: hidden states are whole."""

    def gather(self, shard: Tensor, seq_len: int) -> Tensor:
        return shard

    def reduce(self, partial_sum: Tensor) -> Tensor:
        return partial_sum

    def split(self, whole: Tensor) -> Tensor:
        return whole

    def join(self, shard: Tensor, seq_len: int) -> Tensor:
        return shard


class SequenceShards:
    """Converts between shards and whole hidden states on a one-dimensional mesh. Collective.

    overlap: gather and reduce in the form that the compiler's pass for asynchronous tensor
        parallelism recognises next to a matrix product. The results are the same.
    """

    def __init__(self, mesh: DeviceMesh, overlap: bool = False):
        self._ranks = (mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), overlap)

    def gather(self, shard: Tensor, seq_len: int) -> Tensor:
        """Gather [B, t, M] -> [B, T, M] for a split module: the gradient is summed over ranks."""
        return _Move.apply("all_gather", "reduce_scatter", shard, 1, seq_len, *self._ranks)

    def reduce(self, partial_sum: Tensor) -> Tensor:
        """Sum [B, T, M] over ranks; returns this rank's rows [B, t, M] of the sum."""
        seq_len = partial_sum.shape[1]
        return _Move.apply("reduce_scatter", "all_gather", partial_sum, 1, seq_len, *self._ranks)

    def split(self, whole: Tensor) -> Tensor:
        """Return this rank's rows [B, t, M] of hidden states [B, T, M] that are equal on every rank."""
        return _Move.apply("own_rows", "all_gather", whole, 1, whole.shape[1], *self._ranks)

    def join(self, shard: Tensor, seq_len: int) -> Tensor:
        """Gather [B, t, M] -> [B, T, M], where every rank gets the whole gradient."""
        return join_shards(shard, 1, seq_len, *self._ranks)


def join_shards(
    shard: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool = False
) -> Tensor:
    """Gather all ranks' shards along `dim`, cut to `length`; every rank gets the whole gradient."""
    return _Move.apply("all_gather", "own_rows", shard, dim, length, group, size, rank, overlap)


class _Move(torch.autograd.Function):
    """Apply `_MOVES[move]` to x in forward, and `_MOVES[back]` to the gradient in backward."""

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
        gathered = OPS.wait_tensor(OPS.all_gather_into_tensor(shard.contiguous(), size, group))
        whole = torch.cat(gathered.chunk(size), dim)
        # No `narrow` to the full length: the compiler would not recognise the pattern, and products
        # could not begin before all rows have arrived.
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


_MOVES = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "own_rows": _own_rows}


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros along `dim` until `size` divides it."""
    missing = -x.shape[dim] % size
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
