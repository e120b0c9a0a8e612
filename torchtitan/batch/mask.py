"""`DocumentMask`: the attention mask of packed rows, for all attention kernels.

`DocumentMask.lower` adds the form that a kernel needs. The `mask_mod` of a flex BlockMask is the
DocumentMask that it was made from, so `from_mask` can recover the DocumentMask.

B rows, T tokens per row, cp context-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.batch.documents import document_starts, follow_branches
from torchtitan.distributed.context_parallel import (
    ContextPart,
    NeededKeys,
    TokenShards,
    needed_keys,
)
from torchtitan.tools import torch_parts
from torchtitan.tools.compiler import load_flex_attention
from torchtitan.tools.host_copy import fetch, on_host, to_device


class VarlenMetadata(NamedTuple):
    """Boundaries of the documents of B * T packed tokens.

    cu_seq_q, cu_seq_k: int32 [documents + 1], from 0 to B * T. max_q, max_k: length of the longest
        document.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int | float
    max_k: int | float


# eq=False: masks are hashed by identity, because their tensors cannot be compared.
@dataclass(frozen=True, eq=False)
class DocumentMask:
    """A query sees itself and the keys before it in its own document, and in that document's ancestors.

    starts: int32 [B, T], the column where each token's document, or tree of documents, begins; a padding
        token is a document of its own. None for plain causal rows, and for a client's mask, which has only
        `lowered`.
    window: if set, a query sees only itself and the window - 1 tokens before it.
    rows_are_documents: each row is one document, so `starts` are zeros.
    depths, ends: int32 [B, T], for trees only, see `branch_depths` and `follow_branches`: a token's
        position on its branch, and the last column of the tokens that see it.
    branches, chunk: for trees only, see `needed_keys` (on the host) and `in_chunks`.
    lengths: for varlen, and for flex on the CPU. part: None if this rank holds whole rows.
    lowered: the kernel's own form: a BlockMask (flex), VarlenMetadata or for trees NeededKeys (varlen), or
        bool [B, 1, T, T] (sdpa).
    """

    starts: Tensor | None = None
    window: int | None = None
    depths: Tensor | None = None
    ends: Tensor | None = None
    branches: tuple[Tensor, Tensor] | None = None
    chunk: int | None = None
    rows_are_documents: bool = False
    lengths: VarlenMetadata | NeededKeys | None = None
    lowered: Any = None
    part: ContextPart | None = None

    @classmethod
    def from_mask(cls, mask: Any) -> "DocumentMask":
        """Return the DocumentMask of a `lowered` mask, or of None, which means plain causal."""
        if isinstance(mask, cls):
            return mask
        if isinstance(mask, VarlenMetadata | NeededKeys):
            return cls(lengths=mask, lowered=mask)
        made_of = getattr(mask, "mask_mod", None)
        return replace(made_of if isinstance(made_of, cls) else cls(), lowered=mask)

    @classmethod
    def from_documents(
        cls, document_ids: Tensor, device: torch.device | None = None, depths: Tensor | None = None
    ) -> "DocumentMask":
        """Return the mask of document_ids [B, T], with its tensors on `device`.

        If the ids have a copy on the host, that copy is read, which does not wait for the device.
        depths: the result of `branch_depths`, if the documents are branches of trees.
        """
        device = device or document_ids.device
        if depths is None:
            return cls(to_device(document_starts(on_host(document_ids)), device))
        depths = fetch(depths)
        columns = torch.arange(depths.shape[1], device="cpu", dtype=torch.int32)
        starts = torch.where(depths <= 0, columns, 0).cummax(dim=1).values
        ends, begins, paths = follow_branches(depths)
        branches = begins + depths.clamp(min=0), paths
        starts, depths, ends = (to_device(x, device) for x in (starts, depths, ends))
        return cls(starts, depths=depths, ends=ends, branches=branches)

    @classmethod
    def from_rows(cls, n_rows: int, seq_len: int, device: torch.device) -> "DocumentMask":
        starts = torch.zeros((1, seq_len), device=device, dtype=torch.int32)
        return cls(starts.expand(n_rows, -1), rows_are_documents=True)

    def with_window(self, window: int | None) -> "DocumentMask":
        """Return the mask with this sliding window; raises ValueError if window < 1."""
        check_window(window)
        return replace(self, window=window, lowered=None)

    def in_chunks(self, size: int) -> "DocumentMask":
        """Return the mask that treats every `size` tokens of a document as a document of their own.

        On a branch of a tree, a chunk is all tokens with the same `depth // size`.
        """
        assert self.starts is not None
        if size >= self.starts.shape[1]:
            return self
        if self.depths is not None:
            return replace(self, chunk=size, lengths=None, lowered=None)
        starts = torch.zeros(self.starts.shape, dtype=torch.int32, device="cpu")
        if not self.rows_are_documents:
            starts = on_host(self.starts)
        columns = torch.arange(starts.shape[1], device=starts.device, dtype=torch.int32)
        chunks = columns - (columns - starts) % size
        chunks = to_device(chunks, self.starts.device)
        return replace(self, starts=chunks, rows_are_documents=False, lengths=None, lowered=None)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return True where a query sees a key: the mask function of flex attention."""
        seen = q_idx >= kv_idx
        if self.depths is not None and self.ends is not None:
            seen = seen & (q_idx <= self.ends[b, kv_idx])
            # Chunks and the window count tokens on the branch.
            q_idx, kv_idx = self.depths[b, q_idx], self.depths[b, kv_idx]
            if self.chunk is not None:
                seen = seen & (q_idx - q_idx % self.chunk <= kv_idx)
        elif self.starts is not None and not self.rows_are_documents:
            seen = seen & (kv_idx >= self.starts[b, q_idx])
        if self.window is not None:
            seen = seen & (q_idx - kv_idx < self.window)
        return seen

    # ---- for kernels ----

    def lower(self, attn_type: str) -> "DocumentMask":
        """Return the mask with the kernel's form in `lowered`. "varlen" may wait for the device."""
        if self.lowered is not None or self.starts is None:
            return self
        if attn_type == "varlen":
            mask = self.with_lengths()
            return replace(mask, lowered=mask.lengths)
        if attn_type == "flex":
            mask = self.with_lengths() if self.starts.device.type == "cpu" else self
            return replace(mask, lowered=mask.block_mask())
        n_rows, seq_len = self.starts.shape
        row = torch.arange(n_rows, device=self.starts.device)[:, None, None, None]
        column = torch.arange(seq_len, device=self.starts.device)
        return replace(self, lowered=self(row, row, column[:, None], column))

    def with_lengths(self) -> "DocumentMask":
        """Return the mask with `lengths`; waits for the device if the host has no copy of `starts`."""
        if self.lengths is not None or self.starts is None:
            return self
        if self.depths is not None:
            starts = self.boundaries(self.starts.shape[1])
            assert starts is not None
            one_chunk = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
            given = fetch(starts), len(starts), one_chunk, 0, self.window
            device = self.depths.device
            keys: Any = torch_parts.pytree.tree_map_only(
                Tensor, lambda x: to_device(x, device), needed_keys(*given, self.branches)
            )
            return replace(self, lengths=keys)
        starts = fetch(self.starts)
        columns = torch.arange(starts.shape[1], device="cpu", dtype=torch.int32)
        max_length = int((columns - starts).max()) + 1
        first = (starts == columns).flatten().nonzero().flatten()
        cu_seqlens = torch.cat((first, first.new_tensor([starts.numel()]))).to(torch.int32)
        cu_seqlens = to_device(cu_seqlens, self.starts.device)
        lengths = VarlenMetadata(cu_seqlens, cu_seqlens, max_length, max_length)
        return replace(self, lengths=lengths)

    def block_mask(self, block_size: int = 128) -> Any:
        """Return the BlockMask of this mask. With `rows_are_documents` it has one row, which all rows share.

        It is computed from the boundaries, without evaluating pairs of tokens or waiting for the device.
        """
        assert self.starts is not None
        starts = self.starts[:1] if self.rows_are_documents else self.starts
        seq_len = starts.shape[1]
        if self.window is not None and self.depths is None:
            columns = torch.arange(seq_len, device=starts.device, dtype=starts.dtype)
            starts = torch.maximum(starts, columns - (self.window - 1))
        n_blocks = -(-seq_len // block_size)
        block = torch.arange(n_blocks, device=starts.device, dtype=torch.int32)
        first_query = block * block_size
        last_query = (first_query + block_size - 1).clamp(max=seq_len - 1)

        # Starts never decrease along a row, so a query block's first query has the earliest start, and
        # its last query the latest. [rows, query blocks, key blocks]
        is_before = block < block[:, None]
        is_seen = is_before & (block >= starts[:, first_query, None] // block_size)
        is_full = is_before & (block * block_size >= starts[:, last_query, None])
        if self.depths is not None and self.ends is not None:
            least_end, most_end = _of_blocks(self.ends, block_size)
            is_seen &= most_end[:, None] >= first_query[:, None]
            is_full &= least_end[:, None] >= last_query[:, None]
            least_depth, most_depth = _of_blocks(self.depths, block_size)
            least_seen, most_seen = _of_blocks(self._first_seen_depths(self.depths), block_size)
            is_seen &= most_depth[:, None] >= least_seen[..., None]
            is_full &= least_depth[:, None] >= most_seen[..., None]
        if seq_len % block_size:  # queries past the end see nothing: no key block is full for them
            is_full[:, -1] = False

        def listed(blocks: Tensor) -> list[Tensor]:
            """Return (n [rows, 1, query blocks], order): `order[:n]` are a query block's key blocks."""
            in_order = (~blocks).to(torch.uint8).argsort(dim=-1, stable=True)
            for_all_heads = (blocks.sum(dim=-1), in_order)
            return [x.unsqueeze(1).to(torch.int32).contiguous() for x in for_all_heads]

        return load_flex_attention().BlockMask.from_kv_blocks(
            *listed(is_seen & ~is_full | (block == block[:, None])),
            *listed(is_full),
            BLOCK_SIZE=block_size,
            mask_mod=self,
            seq_lengths=(seq_len, seq_len),
        )

    # ---- context parallelism ----

    def with_part(self, part: ContextPart | None) -> "DocumentMask":
        return replace(self, part=part)

    def starts_of_rows(self, n_rows: int, seq_len: int, device: torch.device) -> Tensor:
        """Return the column where each token's document begins, int [B, T], for whole rows.

        The boundaries must be known, see `boundaries`.
        """
        boundaries = self.boundaries(seq_len) if self.starts is None else self.starts
        assert boundaries is not None
        return starts_from_boundaries(boundaries.to(device), n_rows, seq_len).expand(n_rows, -1)

    def boundaries(self, seq_len: int) -> Tensor | None:
        """Return `starts` [B, T] ([1, T] zeros if each row is one document), or the 1-D cumulative document
        lengths of the flattened rows; None if the boundaries are unknown.
        """
        if self.rows_are_documents or (self.starts is None and self.lowered is None):
            return torch.zeros((1, seq_len), dtype=torch.int32, device="cpu")
        if self.starts is None and isinstance(self.lengths, VarlenMetadata):
            return self.lengths.cu_seq_q
        if self.depths is None:
            return self.starts
        # A token of a tree sees depth + 1 keys. In a row of plain documents it would see as many keys if
        # its document began at column - depth.
        depths = on_host(self.depths).clamp(min=0)
        columns = torch.arange(seq_len, device=depths.device, dtype=torch.int32)
        return columns - (depths if self.chunk is None else depths % self.chunk)

    def _first_seen_depths(self, depths: Tensor) -> Tensor:
        """Return [B, T]: the lowest depth that a token of a tree sees."""
        first = torch.zeros_like(depths) if self.chunk is None else depths - depths % self.chunk
        return first if self.window is None else torch.maximum(first, depths - self.window + 1)


def _of_blocks(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value of each block of columns, [rows, T] -> [rows, blocks]."""
    filled = torch.cat((x, x[:, -1:].expand(-1, -x.shape[1] % block_size)), dim=1)
    extremes = filled.unflatten(1, (-1, block_size)).aminmax(dim=2)
    return extremes.min, extremes.max


Masks = DocumentMask | dict[str, DocumentMask]
"""One mask for all layers, or a mask for each kind of layer."""


def starts_from_boundaries(boundaries: Tensor, n_rows: int, seq_len: int) -> Tensor:
    """Return the column where each token's document begins, [1 or B, T], from `DocumentMask.boundaries`."""
    if boundaries.dim() == 2:
        return boundaries
    tokens = torch.arange(n_rows * seq_len, device=boundaries.device)
    document = torch.searchsorted(boundaries, tokens, right=True) - 1
    return boundaries[document].view(n_rows, seq_len) % seq_len


def check_window(window_size: int | None) -> None:
    if window_size is not None and window_size < 1:
        raise ValueError(f"a sliding window holds at least the query itself, got {window_size=}")


def map_masks(change: Callable[[Any], Any], masks: Any) -> Any:
    """Return `change(mask)` of a mask, or of each mask in a dict."""
    if isinstance(masks, dict):
        return {name: change(mask) for name, mask in masks.items()}
    return change(masks)


def shards_of(attention_masks: Any) -> TokenShards | None:
    """Return how the rows of a mask or a dict of masks are split over ranks; None if they are not split."""
    if isinstance(attention_masks, dict) and attention_masks:
        attention_masks = next(iter(attention_masks.values()))
    is_spread = isinstance(attention_masks, DocumentMask) and attention_masks.part is not None
    return attention_masks.part.shards if is_spread else None


def positions_of_rank(
    attention_masks: Any, positions: Tensor | None, num_tokens: int
) -> Tensor | None:
    """Return the positions of this rank's `num_tokens` tokens; unchanged if rows are not split.

    positions: [1 or B, T] of whole rows or [1 or B, T/cp] of the rank's tokens; None is 0..T-1.
    """
    shards = shards_of(attention_masks)
    if shards is None:
        return positions
    seq_len = shards.cp * num_tokens
    if positions is None:
        positions = torch.arange(seq_len, device=shards.mesh.device_type)[None]
    return shards.shard(positions) if positions.shape[1] == seq_len else positions
