"""Context parallelism: the ranks of a mesh axis hold different tokens of the same rows.

B rows, T tokens per row, cp ranks, H query heads, K key/value heads, D head size. A row is cut
into equal chunks, and each rank holds as many of them: a batch [B, T] becomes [B, T/cp] on each
rank. All that is not attention works on its own tokens, and attention exchanges what it needs:

    allgather   every rank gathers the keys and values of all tokens for its own queries
    alltoall    ranks trade tokens for heads: each computes whole rows for H/cp of the heads
                (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509)

Both give what one process gives, under every mask that keeps documents apart. The mask goes to
attention as a `ShardedMask`, which says of which tokens the rank's own ones are the part.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.context_layout import PTRR_CHUNK, sequence_multiple
from torchtitan.tools.host_copy import on_host, pinned, to_device

__all__ = [
    "TokenShards",
    "ShardedMask",
    "apply_cp_to_attention_module",
    "cp_shard",
    "gathers_keys",
    "positions_of_rank",
    "prepare_context_parallel_input",
    "shards_of",
]

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

    # Plain fields all of them: compiled blocks cannot trace a cached_property, and FSDP makes
    # copies with dataclasses.replace.
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

        Every rank of the axis has to call this, with tensors of one shape. No gradient.
        """
        x = x.movedim(dim, 0).contiguous()
        gathered = _OPS.all_gather_into_tensor(x, self.cp, self.group_name)
        return self.in_order(_OPS.wait_tensor(gathered)).movedim(0, dim)

    def in_order(self, x: Tensor) -> Tensor:
        """Sort tokens [T, ...] that stand rank after rank, as gathering leaves them."""
        return self._permute_chunks(x, self.place_of_chunk)

    def by_rank(self, x: Tensor) -> Tensor:
        """The inverse of `in_order`."""
        return self._permute_chunks(x, self.chunks.flatten())

    def _permute_chunks(self, x: Tensor, order: Tensor) -> Tensor:
        x = x.unflatten(0, (self.chunks.numel(), -1))
        return x.index_select(0, order.to(x.device)).flatten(0, 1)


def _take_chunks(x: Tensor, chunks: Tensor, rank: int, dim: int) -> Tensor:
    """[.., T, ..] -> [.., T/cp, ..], the tokens of a rank; `chunks` on the device of x."""
    x = x.unflatten(dim, (chunks.numel(), -1))
    return x.index_select(dim, chunks[rank]).flatten(dim, dim + 1)


def _deal_chunks(load_balancer: str | None, cp: int, seq_len: int, starts: Tensor | None) -> Tensor:
    """Chunks [cp, n] of each rank. starts: see `_deal_by_work`; only "ptrr" looks at it."""
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
    return _deal_by_work(starts, cp)


def _deal_by_work(starts: Tensor, cp: int) -> Tensor:
    """Chunks [cp, n], dealt out from the one that costs most, back and forth over the ranks.

    starts: [1 or B, T] on the host, the first key that each query sees.
    """
    columns = torch.arange(starts.shape[1], device="cpu")
    work = (columns - starts + 1).sum(dim=0).view(-1, PTRR_CHUNK).sum(dim=1)
    rounds = work.sort(descending=True, stable=True).indices.view(-1, cp)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.sort(dim=1).values


# ---- masks ----


@dataclass(frozen=True)
class ShardedMask:
    """A mask of whole rows for queries that are spread over ranks.

    mask: what one process would give to attention; None is plain causal.
    shards: how the rows' tokens are spread.
    rotate_method: "allgather" or "alltoall".
    keys: for "allgather", which keys this rank's queries need.
    gathering: keys and values on their way; see `start_gathering`.
    """

    mask: Any
    shards: TokenShards
    rotate_method: str
    keys: "_NeededKeys | None" = None
    gathering: tuple[Tensor, Tensor] | None = None

    # ---- alltoall ----

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """[B, heads, T/cp, ...] -> [B, heads/cp, T, ...]; heads a multiple of cp."""
        n_rows, n_heads = x.shape[:2]
        parts = x.unflatten(1, (self.shards.cp, -1)).permute(1, 3, 0, 2, *range(4, x.dim() + 1))
        parts = _ExchangeParts.apply(parts.contiguous(), self.shards.group_name)
        return self.shards.in_order(parts.flatten(0, 1)).movedim(0, 2)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        parts = self.shards.by_rank(x.movedim(2, 0)).unflatten(0, (self.shards.cp, -1))
        parts = _ExchangeParts.apply(parts.contiguous(), self.shards.group_name)
        # [cp, T/cp, B, heads/cp, ...]
        return parts.permute(2, 0, 3, 1, *range(4, parts.dim())).flatten(1, 2)

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

    def start_gathering(self, k: Tensor, v: Tensor) -> "ShardedMask":
        """Send keys and values [B, K, T/cp, D or Dv] to all ranks; returns the mask to attend with.

        Between this and attention there is time for work of its own, and in backward for that
        work's gradients.
        """
        packed = torch.cat((k, v), dim=-1).transpose(1, 2).flatten(0, 1).contiguous()
        packed = _WaitForGradient.apply(packed)
        shards = self.shards
        gathered = _OPS.all_gather_into_tensor(packed.detach(), shards.cp, shards.group_name)
        return ShardedMask(
            self.mask, shards, self.rotate_method, self.keys, gathering=(packed, gathered)
        )

    def gathered_keys(self) -> Tensor:
        """Keys and values [keys, K, D + Dv], one after the other as `keys` wants them."""
        own, gathered = self.gathering
        shards = self.shards
        rows = _GatheredRows.apply(own, gathered, shards.cp, shards.group_name)
        return rows.index_select(0, self.keys.index)


@dataclass(frozen=True)
class _NeededKeys:
    """Stretches of one document that a rank's packed queries [B * T/cp] fall into.

    cu_seq_q, cu_seq_k: int32 [stretches + 1], where each one's queries and keys begin; the last
        query of a stretch sees its last key. max_q, max_k: the longest.
    index: int64 [keys], place of each key among the packed tokens of all ranks, rank after rank.
    window: how many keys back a query sees, itself included; None for any number.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    index: Tensor
    window: int | None

    def each(self, change: Callable[[Tensor], Tensor]) -> "_NeededKeys":
        """The same with other tensors."""
        tensors = {name: getattr(self, name) for name in ("cu_seq_q", "cu_seq_k", "index")}
        return replace(self, **{name: change(x) for name, x in tensors.items()})


def _needed_keys(starts: Tensor, chunks: Tensor, rank: int, window: int | None) -> _NeededKeys:
    """On the host, where sizes that follow from values cost no wait.

    starts: [B, T], the first key that each query sees but for the window. chunks: [cp, n]. Both
    on the host.
    """
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

    # Number all keys through, and look up each one's column and row by its stretch.
    cu_seq_k = _cumulative(n_keys)
    stretch = torch.arange(len(first), device="cpu").repeat_interleave(n_keys)
    offset = torch.arange(len(stretch), device="cpu") - cu_seq_k[stretch]
    where = _place_among_ranks(chunks, n_rows, seq_len)
    index = where[row[first][stretch], first_key[stretch] + offset]
    return _NeededKeys(
        _cumulative(n_queries).to(torch.int32),
        cu_seq_k.to(torch.int32),
        int(n_queries.max()),
        int(n_keys.max()),
        index,
        window,
    )


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


# Bounded, and of plain numbers and tensors of the host: no process group lives on in here.
@functools.lru_cache(maxsize=8)
def _needed_keys_of_whole_rows(
    n_rows: int, seq_len: int, chunks: tuple[tuple[int, ...], ...], rank: int, window: int | None
) -> _NeededKeys:
    """`_needed_keys` of rows that are one document each."""
    starts = torch.zeros((n_rows, seq_len), dtype=torch.int32, device="cpu")
    needed = _needed_keys(starts, torch.tensor(chunks, device="cpu"), rank, window)
    return needed.each(pinned)


def _place_among_ranks(chunks: Tensor, n_rows: int, seq_len: int) -> Tensor:
    """int64 [B, T]: where each token stands when all ranks' packed tokens are laid end to end."""
    columns = torch.arange(seq_len, device="cpu")
    n_local = seq_len // len(chunks)
    by_rank = torch.cat([_take_chunks(columns, chunks, r, dim=0) for r in range(len(chunks))])
    # By column: its rank's first token, and how many tokens of its row stand before it there.
    place = torch.empty_like(columns)
    place[by_rank] = columns // n_local * (n_rows * n_local) + columns % n_local
    return place + n_local * torch.arange(n_rows, device="cpu")[:, None]


def _boundaries_of(mask: Any, seq_len: int) -> tuple[Tensor | None, int | None]:
    """(what says where documents begin, window) of a mask.

    The former is where each token's document begins [1 or B, T], or cumulative lengths
    [documents + 1]; None if the mask does not say.
    """
    if mask is None:
        return torch.zeros((1, seq_len), dtype=torch.int32, device="cpu"), None
    boundaries = getattr(mask, "document_starts", None)
    if boundaries is None:
        boundaries = getattr(getattr(mask, "varlen_metadata", mask), "cu_seq_q", None)
    return boundaries, getattr(mask, "window", None)


def _read_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same on the host; waits for the device once if any is there and no copy of the host's."""
    tensors = [on_host(x) for x in tensors]
    away = [x for x in tensors if x.device.type != "cpu"]
    if not away:
        return tensors
    read = iter(torch.cat([x.flatten() for x in away]).cpu().split([x.numel() for x in away]))
    return [x if x.device.type == "cpu" else next(read).view(x.shape) for x in tensors]


def _starts_of(boundaries: Tensor, n_rows: int, seq_len: int) -> Tensor:
    """[1 or B, T], the first key that each query sees but for the window; all on the host."""
    if boundaries.dim() == 2:
        return boundaries
    first = boundaries[:-1].repeat_interleave(boundaries.diff(), output_size=n_rows * seq_len)
    return first.view(n_rows, seq_len) % seq_len


# ---- what a trainer calls ----


def cp_shard(
    cp_mesh: DeviceMesh,
    inputs: tuple[Tensor, ...],
    attention_masks: Any = None,
    load_balancer_type: str | None = "headtail",
    input_seq_dim: int = 1,
    rotate_method: str | None = "allgather",
) -> tuple[tuple[Tensor, ...], Any]:
    """Return this rank's part of each input, and the mask (or dict of masks) for it.

    inputs: tensors of whole rows, T along `input_seq_dim`, the first one [B, T, ...].
    attention_masks: a BlockMask, VarlenMetadata, a dict of them, or None for plain causal.
    load_balancer_type: "headtail"; "ptrr", by the work that the mask means; None, consecutive
        parts.
    rotate_method: None is "allgather" for masks that say where documents begin, or "alltoall".
    No communication. Raises ValueError if T does not divide, or if `rotate_method` is
    "allgather" and a mask does not say where its documents begin.
    Waits for the device once if only the device knows where documents begin and "allgather" or
    "ptrr" needs to: for masks that were not made from a batch of the host (see
    `tools.host_copy`).
    """
    masks = attention_masks if isinstance(attention_masks, dict) else {"": attention_masks}
    n_rows, seq_len = inputs[0].shape[0], inputs[0].shape[input_seq_dim]
    if any(isinstance(mask, Tensor) for mask in masks.values()):
        raise ValueError(
            "a padding mask [B, T] cannot be spread over context-parallel ranks as it is; make "
            "the kernel's mask of it with the model's get_padding_masks(padding_mask) first"
        )
    found = {name: _boundaries_of(mask, seq_len) for name, mask in masks.items()}
    silent = [name for name, (boundaries, _) in found.items() if boundaries is None]
    if rotate_method is None:
        rotate_method = "alltoall" if silent else "allgather"
    if rotate_method == "allgather" and silent:
        raise ValueError(
            "parallelism.context_parallel_rotate_method = 'allgather' needs a mask made by the "
            "model's get_attention_masks, which says where documents begin, got a "
            f"{type(masks[silent[0]]).__name__}; set it to 'alltoall'"
        )
    starts: dict[str, Tensor] = {}
    if rotate_method == "allgather" or load_balancer_type == "ptrr":
        known = {name: x for name, (x, _) in found.items() if x is not None}
        for name, boundaries in zip(known, _read_all([*known.values()]), strict=True):
            starts[name] = _starts_of(boundaries, n_rows, seq_len)
    # With several masks, the one that is wider decides what is balanced.
    widest = None
    if attention_masks is not None and starts:
        widest = min(starts.values(), key=lambda s: int(s.sum()) * n_rows // len(s))
    chunks = _deal_chunks(load_balancer_type, cp_mesh.size(), seq_len, widest)
    shards = TokenShards.of(chunks, cp_mesh)

    sharded = {}
    for name, mask in masks.items():
        keys = None
        if rotate_method == "allgather":
            first, rank, window = starts[name], cp_mesh.get_local_rank(), found[name][1]
            if first.any():
                keys = _needed_keys(first.expand(n_rows, -1), chunks, rank, window)
            else:
                layout = tuple(map(tuple, chunks.tolist()))
                keys = _needed_keys_of_whole_rows(n_rows, seq_len, layout, rank, window)
            keys = keys.each(lambda x: to_device(x, inputs[0].device))
        sharded[name] = ShardedMask(mask, shards, rotate_method, keys)
    parts = tuple(shards.shard(x, input_seq_dim) for x in inputs)
    return parts, sharded if isinstance(attention_masks, dict) else sharded[""]


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor | None,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    rotate_method: str | None = None,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return this rank's tokens, labels and the keyword arguments of the model's forward.

    inputs: tokens [B, T]; labels: [B, T] or None, shifted already: a part does not see its right
    neighbour. extra_kwargs: may hold `attention_masks` and `positions` [1 or B, T] of whole rows,
    and gets those for the rank's own tokens. device: accepted for compatibility. rotate_method: as
    in `cp_shard`.
    Without positions none are added: the model has them from the mask (`positions_of_rank`), and
    a caller with positions of its own passes them to the model as they are.
    Changes and returns `extra_kwargs`. Raises like `cp_shard`.
    """
    whole = (inputs,) if labels is None else (inputs, labels)
    parts, masks = cp_shard(
        cp_mesh,
        whole,
        extra_kwargs.get("attention_masks"),
        load_balancer_type,
        rotate_method=rotate_method,
    )
    extra_kwargs["attention_masks"] = masks
    if extra_kwargs.get("positions") is not None:
        extra_kwargs["positions"] = positions_of_rank(
            masks, extra_kwargs["positions"], parts[0].shape[1]
        )
    return parts[0], parts[1] if labels is not None else None, extra_kwargs


def shards_of(attention_masks: Any) -> TokenShards | None:
    """Return how the rows that a mask (or a dict of masks) is for are spread; None if they aren't."""
    if isinstance(attention_masks, dict) and attention_masks:
        attention_masks = next(iter(attention_masks.values()))
    return attention_masks.shards if isinstance(attention_masks, ShardedMask) else None


def gathers_keys(attention_masks: Any) -> bool:
    """Whether attention under this mask gathers keys, so that `start_gathering` pays."""
    return isinstance(attention_masks, ShardedMask) and attention_masks.rotate_method == "allgather"


def positions_of_rank(
    attention_masks: Any, positions: Tensor | None, num_tokens: int
) -> Tensor | None:
    """Return the positions of this rank's `num_tokens` tokens; as they are if rows are not spread.

    positions: [1 or B, T] of whole rows or [1 or B, T/cp] of the rank's tokens; None is 0..T-1.
    """
    shards = shards_of(attention_masks)
    if shards is None:
        return positions
    seq_len = shards.cp * num_tokens
    if positions is None:
        positions = torch.arange(seq_len, device=shards.mesh.device_type)[None]
    return shards.shard(positions) if positions.shape[1] == seq_len else positions


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

    Gradients are summed where they belong. Nobody has waited for them: `_WaitForGradient` does,
    which x has to come from.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _OPS.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = _OPS.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.size, ctx.group)
        return own, None, None, None


class _WaitForGradient(torch.autograd.Function):
    """x itself, whose gradient is one that a collective is still working on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _OPS.wait_tensor(grad)


class _ExchangeParts(torch.autograd.Function):
    """[cp, ...]: part p goes to rank p, and comes back as the part of the rank it is from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad.contiguous(), ctx.group), None


def _exchange(x: Tensor, group: str) -> Tensor:
    one_each = [1] * x.shape[0]
    return _OPS.wait_tensor(_OPS.all_to_all_single(x, one_each, one_each, group))
