"""Context parallelism: the ranks of a mesh axis hold different tokens of the same rows.

B rows, T tokens per row, cp ranks, H query heads, K key/value heads, D head size. A row is cut
into equal chunks, and each rank holds equally many of them: a batch [B, T] becomes [B, T/cp] on
each rank. Attention exchanges what it needs; everything else works on the rank's own tokens.

    allgather   every rank gathers the keys and values of all tokens for its own queries
    alltoall    ranks trade tokens for heads: each computes whole rows for H/cp of the heads
                (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509)

Both give what one process gives, under every mask that keeps documents apart. The mask that goes
to attention has a `ContextPart`, which says which tokens the rank holds.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from torchtitan.config.context_layout import PTRR_CHUNK, sequence_multiple
from torchtitan.distributed.collectives import AllToAll, start_all_gather, start_reduce_scatter
from torchtitan.tools.host_copy import pinned, to_device
from torchtitan.tools.lazy_names import load_on_access

# The reference has these here; they are about masks, too, which stand above this package.
__getattr__ = load_on_access(
    __name__,
    {
        "cp_shard": "torchtitan.batch.mask",
        "prepare_context_parallel_input": "torchtitan.batch.mask",
    },
)

# Selective checkpointing and the compiler know collectives by these operators.
_OPS = torch.ops._c10d_functional


# ---- which tokens a rank holds ----


@dataclass(frozen=True)
class TokenShards:
    """Which chunks of a row each rank of the axis holds.

    chunks: int64 [cp, n]; rank r holds chunks[r], in this order, of the cp * n equal chunks of a
        row.
    place_of_chunk: int64 [cp * n], where each chunk stands in `chunks`, read row after row.
    mesh, group_name: the axis, and its process group. Both tensors are on its device: every
        attention layer reads them.
    """

    # Only plain fields: compiled blocks cannot trace a cached_property, and FSDP makes copies
    # with dataclasses.replace.
    chunks: Tensor
    place_of_chunk: Tensor
    mesh: DeviceMesh
    group_name: str

    @classmethod
    def of(cls, chunks: Tensor, mesh: DeviceMesh) -> "TokenShards":
        """chunks: on the host."""
        place_of_chunk = chunks.flatten().argsort()
        on_device = (to_device(x, mesh.device_type) for x in (chunks, place_of_chunk))
        return cls(*on_device, mesh, mesh.get_group().group_name)

    @property
    def cp(self) -> int:
        return self.chunks.shape[0]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of x, [.., T, ..] -> [.., T/cp, ..]. No communication."""
        return _take_chunks(x, self.chunks.to(x.device), self.mesh.get_local_rank(), dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all tokens in their order from those of each rank, [.., T/cp, ..] -> [.., T, ..].

        Every rank of the axis has to call this, with tensors of one shape. The gradient of its own
        tokens goes back: all ranks are to compute the same of what is returned.
        """
        return _Unshard.apply(x, self, dim)

    def in_order(self, x: Tensor) -> Tensor:
        """Sort tokens [T, ...] that stand rank after rank, as gathering leaves them."""
        return self._permute_chunks(x, self.place_of_chunk)

    def by_rank(self, x: Tensor) -> Tensor:
        """The inverse of `in_order`."""
        return self._permute_chunks(x, self.chunks.flatten())

    def _permute_chunks(self, x: Tensor, order: Tensor) -> Tensor:
        x = x.unflatten(0, (self.chunks.numel(), -1))
        return x.index_select(0, order.to(x.device)).flatten(0, 1)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards, dim: int) -> Tensor:
        ctx.shards, ctx.dim = shards, dim
        x = x.movedim(dim, 0)
        gathered = start_all_gather(x, shards.cp, shards.group_name)
        return shards.in_order(_OPS.wait_tensor(gathered)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shards.shard(grad, ctx.dim), None, None


def _take_chunks(x: Tensor, chunks: Tensor, rank: int, dim: int) -> Tensor:
    """[.., T, ..] -> [.., T/cp, ..], the tokens of a rank; `chunks` on the device of x."""
    x = x.unflatten(dim, (chunks.numel(), -1))
    return x.index_select(dim, chunks[rank]).flatten(dim, dim + 1)


def deal_chunks(load_balancer: str | None, cp: int, seq_len: int, starts: Tensor | None) -> Tensor:
    """Chunks [cp, n] of each rank.

    starts: [1 or B, T] on the host, the first key that each query sees; only "ptrr" looks at it.
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
        # Causal work grows along a row: one chunk of each end makes two of the middle.
        return torch.stack((ranks, 2 * cp - 1 - ranks), dim=1)
    if starts is None:
        raise ValueError(
            "parallelism.context_parallel_load_balancer = 'ptrr' balances by the mask, and there "
            "is none; set it to 'headtail', or model.attn_type to 'flex' or 'varlen'"
        )
    # Deal out from the chunk that costs most, back and forth over the ranks.
    columns = torch.arange(seq_len, device="cpu")
    work = (columns - starts + 1).sum(dim=0).view(-1, PTRR_CHUNK).sum(dim=1)
    rounds = work.sort(descending=True, stable=True).indices.view(-1, cp)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.sort(dim=1).values


# ---- what attention exchanges ----


@dataclass(frozen=True)
class ContextPart:
    """How attention works on rows of which this rank holds only some tokens.

    shards: how the rows' tokens are spread.
    rotate_method: "allgather" or "alltoall".
    keys: for "allgather", which keys this rank's queries need.
    gathering: keys and values on their way; see `start_gathering`.
    """

    shards: TokenShards
    rotate_method: str
    keys: "NeededKeys | None" = None
    gathering: tuple[Tensor, Tensor] | None = None

    # ---- alltoall ----

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """[B, heads, T/cp, ...] -> [B, heads/cp, T, ...]; heads a multiple of cp."""
        n_rows, n_heads = x.shape[:2]
        parts = x.unflatten(1, (self.shards.cp, -1)).permute(1, 3, 0, 2, *range(4, x.dim() + 1))
        return self.shards.in_order(self._exchange(parts).flatten(0, 1)).movedim(0, 2)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        parts = self.shards.by_rank(x.movedim(2, 0)).unflatten(0, (self.shards.cp, -1))
        parts = self._exchange(parts)  # [cp, T/cp, B, heads/cp, ...]
        return parts.permute(2, 0, 3, 1, *range(4, parts.dim())).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """[cp, ...]: part p goes to rank p, and comes back as the part of the rank it is from."""
        one_each = [1] * self.shards.cp
        return AllToAll.apply(parts, one_each, one_each, self.shards.group_name)

    def repeats_of_kv_heads(self, n_heads: int, n_kv_heads: int) -> int:
        """How often each key head is needed so that every rank has those of its query heads.

        Raises ValueError if the query heads don't divide over the ranks.
        """
        cp = self.shards.cp
        if n_heads % cp:
            raise ValueError(
                f"parallelism.context_parallel_rotate_method = 'alltoall' deals {n_heads} "
                f"attention heads to {cp} ranks; take a context_parallel_degree that divides "
                "them, or 'allgather'"
            )
        repeats = math.lcm(n_kv_heads, cp) // n_kv_heads
        return repeats if n_heads % (n_kv_heads * repeats) == 0 else n_heads // n_kv_heads

    # ---- allgather ----

    def start_gathering(self, k: Tensor, v: Tensor) -> "ContextPart":
        """Send keys and values [B, K, T/cp, D or Dv] to all ranks; returns what to attend with.

        On accelerators, other work can be done between this and attention while the keys travel,
        and in backward that work's gradients while the keys' gradients do. On the CPU both are
        there before anything goes on.
        """
        packed = torch.cat((k, v), dim=-1).transpose(1, 2).flatten(0, 1).contiguous()
        packed = _WaitForGradient.apply(packed)
        shards = self.shards
        gathered = start_all_gather(packed.detach(), shards.cp, shards.group_name)
        return ContextPart(shards, self.rotate_method, self.keys, gathering=(packed, gathered))

    def gathered_keys(self) -> Tensor:
        """Keys and values [keys, K, D + Dv], one after the other as `keys` wants them."""
        own, gathered = self.gathering
        shards = self.shards
        rows = _GatheredRows.apply(own, gathered, shards.cp, shards.group_name)
        return rows.index_select(0, self.keys.index)


class NeededKeys(NamedTuple):
    """Stretches of one document that a rank's packed queries [B * T/cp] fall into.

    cu_seq_q, cu_seq_k: int32 [stretches + 1], where each one's queries and keys begin; the last
        query of a stretch sees its last key. max_q, max_k: the longest.
    index: int64 [keys], place of each key among the packed tokens of all ranks, rank after rank.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    index: Tensor


def needed_keys(
    starts: Tensor, n_rows: int, chunks: Tensor, rank: int, window: int | None
) -> NeededKeys:
    """What a rank needs, on the host, where sizes that follow from values cost no wait.

    starts: [1 or B, T], the first key that each query sees but for the window. chunks: [cp, n].
    Both on the host.
    """
    if starts.any():
        return _needed_keys(starts.expand(n_rows, -1), chunks, rank, window)
    layout = tuple(map(tuple, chunks.tolist()))
    return _needed_keys_of_whole_rows(n_rows, starts.shape[1], layout, rank, window)


# Bounded, and of plain numbers and tensors of the host: it keeps no process group alive.
@functools.lru_cache(maxsize=8)
def _needed_keys_of_whole_rows(
    n_rows: int, seq_len: int, chunks: tuple[tuple[int, ...], ...], rank: int, window: int | None
) -> NeededKeys:
    starts = torch.zeros((n_rows, seq_len), dtype=torch.int32, device="cpu")
    needed = _needed_keys(starts, torch.tensor(chunks, device="cpu"), rank, window)
    return tree_map_only(Tensor, pinned, needed)


def _needed_keys(starts: Tensor, chunks: Tensor, rank: int, window: int | None) -> NeededKeys:
    n_rows, seq_len = starts.shape
    columns = torch.arange(seq_len, device="cpu").expand(n_rows, -1)
    place = _take_chunks(columns, chunks, rank, dim=1).flatten()
    row = torch.arange(n_rows, device="cpu").repeat_interleave(seq_len // len(chunks))
    start = _take_chunks(starts, chunks, rank, dim=1).flatten()

    # A stretch ends where the next query is of another row, document or chunk.
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (start[1:] != start[:-1]) | (place[1:] != place[:-1] + 1)
    first = begins.nonzero().flatten()
    end = torch.cat((first[1:], first.new_tensor([len(place)])))
    n_queries = end - first
    first_key = start[first].long()
    if window is not None:
        first_key = torch.maximum(first_key, place[first] - window + 1)
    n_keys = place[end - 1] + 1 - first_key

    # Number the keys of all stretches, and look up each one's column and row by its stretch.
    cu_seq_k = _cumulative(n_keys)
    stretch = torch.arange(len(first), device="cpu").repeat_interleave(n_keys)
    offset = torch.arange(len(stretch), device="cpu") - cu_seq_k[stretch]
    # By column: its rank's first token among all ranks' packed tokens, laid end to end, and how
    # many tokens of its row stand before it there.
    columns = torch.arange(seq_len, device="cpu")
    by_rank = torch.cat([_take_chunks(columns, chunks, r, dim=0) for r in range(len(chunks))])
    n_local = seq_len // len(chunks)
    where = torch.empty_like(columns)
    where[by_rank] = columns // n_local * (n_rows * n_local) + columns % n_local
    index = where[first_key[stretch] + offset] + n_local * row[first][stretch]
    return NeededKeys(
        _cumulative(n_queries).to(torch.int32),
        cu_seq_k.to(torch.int32),
        int(n_queries.max()),
        int(n_keys.max()),
        index,
    )


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def apply_cp_to_attention_module(
    attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh, attention_type: str
) -> None:
    """Not needed here, and refused: attention learns from its mask that tokens are spread.

    Raises NotImplementedError, or ValueError for an unknown `attention_type`.
    """
    if attention_type not in ("sdpa", "flex", "varlen"):
        raise ValueError(f"attention_type must be sdpa, flex or varlen, got {attention_type!r}")
    raise NotImplementedError(
        "attention modules need no change for context parallelism here; drop this call, and give "
        "the model the tokens and attention_masks that prepare_context_parallel_input(inputs, "
        "labels, extra_kwargs, cp_mesh, device, load_balancer) returns"
    )


# ---- collectives with gradients ----


class _GatheredRows(torch.autograd.Function):
    """[n, ...] of each rank -> [cp * n, ...] on all, which are on their way as `gathered`.

    Each rank gets the sum of its own rows' gradients. On accelerators backward does not wait for
    them: `_WaitForGradient`, which x has to come from, does. On the CPU they are there at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _OPS.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return start_reduce_scatter(grad, ctx.size, ctx.group), None, None, None


class _WaitForGradient(torch.autograd.Function):
    """x itself; its gradient is one that a collective is still working on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _OPS.wait_tensor(grad)
