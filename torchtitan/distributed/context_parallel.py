"""Context parallelism: the ranks of a mesh axis hold different tokens of the same rows.

B rows, T tokens per row, cp ranks, H query heads, K key/value heads, D head size. A row is cut
into equal chunks, and each rank holds the same number of chunks: a batch [B, T] becomes
[B, T/cp] on each rank. Only attention communicates; all other layers work on the rank's tokens.

    allgather   every rank gathers the keys and values of all tokens for its own queries
    alltoall    ranks trade tokens for heads: each computes whole rows for H/cp of the heads
                (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509)

"allgather" needs causal masks with known document boundaries. The mask passed to attention has a
`ContextPart`. `batch.context` shards a batch and its masks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.context_layout import PTRR_CHUNK, sequence_multiple
from torchtitan.distributed.collectives import (
    OPS,
    AllToAll,
    Collective,
    start_all_gather,
    start_reduce_scatter,
)
from torchtitan.distributed.sequence_parallel import join_shards
from torchtitan.tools.host_copy import to_device
from torchtitan.tools.lazy_names import load_on_access, not_available

# torchtitan 0.2.x has these two functions here. Ours need `batch.mask`, which imports this module.
__getattr__ = load_on_access(
    __name__,
    {
        "cp_shard": "torchtitan.batch.context",
        "prepare_context_parallel_input": "torchtitan.batch.context",
    },
)


# ---- which tokens a rank holds ----


@dataclass(frozen=True)
class TokenShards:
    """The chunks of a row that each rank of the axis holds. Tensors are on the axis's device.

    chunks: int64 [cp, n]. A row is cut into cp * n equal chunks; rank r holds chunks[r], in order.
    place_of_chunk: int64 [cp * n], the position of each chunk in the flattened `chunks`.
    """

    # Plain fields only: compiled blocks cannot trace a cached_property, and FSDP copies the object
    # with dataclasses.replace.
    chunks: Tensor
    place_of_chunk: Tensor
    mesh: DeviceMesh
    group_name: str
    # This process's rank on the axis.
    rank: int = 0

    @classmethod
    def from_chunks(cls, chunks: Tensor, mesh: DeviceMesh) -> "TokenShards":
        """Return the shards for `chunks`, a tensor in host memory."""
        place_of_chunk = chunks.flatten().argsort()
        on_device = (to_device(x, mesh.device_type) for x in (chunks, place_of_chunk))
        return cls(*on_device, mesh, mesh.get_group().group_name, mesh.get_local_rank())

    @property
    def cp(self) -> int:
        return self.chunks.shape[0]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of x, [.., T, ..] -> [.., T/cp, ..]. No communication."""
        return _take_chunks(x, self.chunks.to(x.device), self.mesh.get_local_rank(), dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all ranks' tokens in row order, [.., T/cp, ..] -> [.., T, ..].

        Collective. Each rank gets the gradient of its own tokens, not a sum over ranks, so all ranks
        must compute the same value from the result.
        """
        ranks = self.group_name, self.cp, self.mesh.get_local_rank()
        whole = join_shards(x, dim, x.shape[dim] * self.cp, *ranks)
        return self.in_order(whole.movedim(dim, 0)).movedim(0, dim)

    def in_order(self, x: Tensor) -> Tensor:
        """Reorder tokens [T, ...] from rank order, as an all-gather returns them, to row order."""
        return self._permute_chunks(x, self.place_of_chunk)

    def by_rank(self, x: Tensor) -> Tensor:
        """Reorder tokens [T, ...] from row order to rank order."""
        return self._permute_chunks(x, self.chunks.flatten())

    def _permute_chunks(self, x: Tensor, order: Tensor) -> Tensor:
        x = x.unflatten(0, (self.chunks.numel(), -1))
        return x.index_select(0, order.to(x.device)).flatten(0, 1)


def _take_chunks(x: Tensor, chunks: Tensor, rank: int, dim: int) -> Tensor:
    """Return the tokens of a rank, [.., T, ..] -> [.., T/cp, ..]; `chunks` is on x's device."""
    x = x.unflatten(dim, (chunks.numel(), -1))
    return x.index_select(dim, chunks[rank]).flatten(dim, dim + 1)


def deal_chunks(load_balancer: str | None, cp: int, seq_len: int, starts: Tensor | None) -> Tensor:
    """Return the chunks that each rank holds, [cp, n] on the host.

    starts: [1 or B, T] on the host, the column where each token's document begins, for "ptrr".
    Raises ValueError for rows that cannot be cut into equal chunks, and for "ptrr" without `starts`.
    """
    multiple = sequence_multiple(load_balancer, cp)
    if seq_len % multiple:
        raise ValueError(
            f"context parallelism over {cp} ranks with load balancer {load_balancer!r} needs rows "
            f"of a multiple of {multiple} tokens, got {seq_len}; pad them"
        )
    ranks = torch.arange(cp, device="cpu")
    if not load_balancer:
        return ranks[:, None]
    if load_balancer == "headtail":
        # Causal work grows along a row: a chunk from each end costs as much as two from the middle.
        return torch.stack((ranks, 2 * cp - 1 - ranks), dim=1)
    if starts is None:
        raise ValueError(
            "parallelism.context_parallel_load_balancer = 'ptrr' balances work by the attention "
            "mask, but there is none; set it to 'headtail', or model.attn_type to 'flex' or 'varlen'"
        )
    # Assign chunks to ranks in snake order, the most expensive first.
    columns = torch.arange(seq_len, device="cpu")
    work = (columns - starts + 1).sum(dim=0).view(-1, PTRR_CHUNK).sum(dim=1)
    rounds = work.sort(descending=True, stable=True).indices.view(-1, cp)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.sort(dim=1).values


# ---- what attention exchanges ----


@dataclass(frozen=True)
class ContextPart:
    """How attention communicates if each rank holds only some tokens of every row.

    keys: for "allgather", the keys that this rank's queries need.
    gathering: (this rank's packed keys and values, their pending all-gather).
    """

    shards: TokenShards
    rotate_method: str
    keys: "NeededKeys | None" = None
    gathering: tuple[Tensor, Tensor] | None = None

    # ---- alltoall ----

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """Trade tokens for heads: [B, heads, T/cp, ...] -> [B, heads/cp, T, ...]; cp divides heads."""
        n_rows, n_heads = x.shape[:2]
        parts = x.unflatten(1, (self.shards.cp, -1)).permute(1, 3, 0, 2, *range(4, x.dim() + 1))
        return self.shards.in_order(self._exchange(parts).flatten(0, 1)).movedim(0, 2)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        parts = self.shards.by_rank(x.movedim(2, 0)).unflatten(0, (self.shards.cp, -1))
        parts = self._exchange(parts)  # [cp, T/cp, B, heads/cp, ...]
        return parts.permute(2, 0, 3, 1, *range(4, parts.dim())).flatten(1, 2)

    def own_heads(self, weight: Tensor) -> Tensor:
        """Return the rows of a weight [heads * n, ...] of the heads this rank has after `tokens_to_heads`."""
        return weight.unflatten(0, (self.shards.cp, -1))[self.shards.rank]

    def _exchange(self, parts: Tensor) -> Tensor:
        """All-to-all: send part p of [cp, ...] to rank p; part r of the result comes from rank r."""
        one_each = [1] * self.shards.cp
        return AllToAll.apply(parts, one_each, one_each, self.shards.group_name)

    def repeats_of_kv_heads(self, n_heads: int, n_kv_heads: int) -> int:
        """Return how often to repeat each key head so that every rank gets the keys of its query heads."""
        repeats = math.lcm(n_kv_heads, self.shards.cp) // n_kv_heads
        return repeats if n_heads % (n_kv_heads * repeats) == 0 else n_heads // n_kv_heads

    # ---- allgather ----

    def start_gathering(self, k: Tensor, v: Tensor) -> "ContextPart":
        """Start to gather keys and values [B, K, T/cp, D or Dv]; returns a part with `gathering` set.

        On accelerators the all-gather overlaps with the computation between this call and attention,
        and backward's reduce-scatter overlaps with the backward of the same computation.
        """
        packed = torch.cat((k, v), dim=-1).transpose(1, 2).flatten(0, 1).contiguous()
        packed = Collective.apply("keep", "wait", packed)
        shards = self.shards
        gathered = start_all_gather(packed.detach(), shards.cp, shards.group_name)
        return ContextPart(shards, self.rotate_method, self.keys, gathering=(packed, gathered))

    def gathered_keys(self) -> Tensor:
        """Return the keys and values [keys, K, D + Dv] in the order of `keys.index`."""
        own, gathered = self.gathering
        shards = self.shards
        rows = _GatheredRows.apply(own, gathered, shards.cp, shards.group_name)
        return rows.index_select(0, self.keys.index)


class NeededKeys(NamedTuple):
    """The keys that a rank's packed queries [B * T/cp] see, grouped by stretch.

    A stretch is a run of consecutive queries of one document; its last query sees the stretch's last key.
    Also used without context parallelism for trees of documents, where documents share keys.

    cu_seq_q, cu_seq_k: int32 [stretches + 1], where the queries and the keys of each stretch begin.
        max_q, max_k: the most queries and the most keys of a stretch.
    index: int64 [keys], the position of each key in all ranks' packed tokens, in rank order.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    index: Tensor


def needed_keys(
    starts: Tensor,
    n_rows: int,
    chunks: Tensor,
    rank: int,
    window: int | None,
    branches: tuple[Tensor, Tensor] | None = None,
) -> NeededKeys:
    """Return the keys that a rank needs. Computes on the host.

    starts: [1 or B, T], the first key that each query sees if there is no window. chunks: [cp, n].
    branches: (own [B, T], paths [m]), for trees of documents. paths: the columns of all branches,
        concatenated. own: each query's index in paths. The query in row b, column c sees
        n = c + 1 - starts[b, c] keys, in the columns paths[own[b, c] + 1 - n : own[b, c] + 1].
    """
    starts = starts.expand(n_rows, -1)
    seq_len = starts.shape[1]
    columns = torch.arange(seq_len, device="cpu").expand(n_rows, -1)
    own, paths = (columns, columns[0]) if branches is None else branches
    starts = starts - columns + own
    place, own, start = (
        _take_chunks(x, chunks, rank, dim=1).flatten() for x in (columns, own, starts)
    )
    row = torch.arange(n_rows, device="cpu").repeat_interleave(seq_len // len(chunks))

    # A stretch ends where the next query belongs to another row or document, or isn't adjacent.
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (start[1:] != start[:-1]) | (place[1:] != place[:-1] + 1)
    first = begins.nonzero().flatten()
    end = torch.cat((first[1:], first.new_tensor([len(place)])))
    n_queries = end - first
    first_key = start[first].long()
    if window is not None:
        first_key = torch.maximum(first_key, own[first] - window + 1)
    n_keys = own[end - 1] + 1 - first_key

    # For each key, its stretch and its offset in the stretch, which determine the key's row and column.
    cu_seq_k = _cumulative(n_keys)
    stretch = torch.arange(len(first), device="cpu").repeat_interleave(n_keys)
    offset = torch.arange(len(stretch), device="cpu") - cu_seq_k[stretch]
    # where[c]: the index of row 0's token in column c, among all ranks' packed tokens.
    columns = torch.arange(seq_len, device="cpu")
    by_rank = torch.cat([_take_chunks(columns, chunks, r, dim=0) for r in range(len(chunks))])
    n_local = seq_len // len(chunks)
    where = torch.empty_like(columns)
    where[by_rank] = columns // n_local * (n_rows * n_local) + columns % n_local
    index = where[paths[first_key[stretch] + offset]] + n_local * row[first][stretch]
    return NeededKeys(
        _cumulative(n_queries).to(torch.int32),
        cu_seq_k.to(torch.int32),
        int(n_queries.max()),
        int(n_keys.max()),
        index,
    )


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


apply_cp_to_attention_module = not_available(
    "attention modules need no change for context parallelism here; drop this call, and give the model "
    "the tokens and attention_masks that prepare_context_parallel_input(inputs, labels, extra_kwargs, "
    "cp_mesh, device, load_balancer) returns"
)


# ---- collectives with gradients ----


class _GatheredRows(torch.autograd.Function):
    """Wait for `gathered`, the started all-gather of x: [n, ...] on each rank -> [cp * n, ...].

    Backward starts the reduce-scatter of the gradient; `start_gathering` waits for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return OPS.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return start_reduce_scatter(grad, ctx.size, ctx.group), None, None, None
