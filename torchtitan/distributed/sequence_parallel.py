"""Sequence parallelism: hidden states spread by tokens over the ranks of a tensor-parallel mesh.

Between the modules whose work is split over tp ranks, each rank holds the hidden states of its
own tokens (Korthikanti et al. 2022, arXiv:2205.05198):

    whole    [B, T, M]
    a shard  [B, t, M], t = ceil(T / tp): rank r has the tokens from r * t on

If tp does not divide T, the last shards end in rows of zeros, which `gather` and `join` drop. Use
`gather` in a split module, where each rank's gradient is one summand of the whole gradient, and `join`
elsewhere (logits, pipeline stages), where every rank has the whole gradient.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.collectives import Collective


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
        return Collective.apply("all_gather", "reduce_scatter", shard, 1, seq_len, *self._ranks)

    def reduce(self, partial_sum: Tensor) -> Tensor:
        """Sum [B, T, M] over ranks; returns this rank's rows [B, t, M] of the sum."""
        seq_len = partial_sum.shape[1]
        return Collective.apply(
            "reduce_scatter", "all_gather", partial_sum, 1, seq_len, *self._ranks
        )

    def split(self, whole: Tensor) -> Tensor:
        """Return this rank's rows [B, t, M] of hidden states [B, T, M] that are equal on every rank."""
        return Collective.apply("own_rows", "all_gather", whole, 1, whole.shape[1], *self._ranks)

    def join(self, shard: Tensor, seq_len: int) -> Tensor:
        """Gather [B, t, M] -> [B, T, M]; every rank has the whole gradient, so backward sums nothing."""
        return join_shards(shard, 1, seq_len, *self._ranks)


def join_shards(
    shard: Tensor, dim: int, length: int, group: str, size: int, rank: int, overlap: bool = False
) -> Tensor:
    """Gather all ranks' shards along `dim`, cut to `length`; backward takes this rank's part, without a sum."""
    return Collective.apply(
        "all_gather", "own_rows", shard, dim, length, group, size, rank, overlap
    )
