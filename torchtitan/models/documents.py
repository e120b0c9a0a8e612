"""Where documents begin: every kind of separator ends as one tensor of document ids.

B rows, T tokens per row. Ids are [B, T] int32, counted from 0 in each row; padding is -1.
A document is a contiguous run of one id: when an id comes back after another one, a new
document begins. Everything downstream (masks, kernels, loss boundaries, positions) reads ids
and does not know where they came from.

Nothing here reads a device value on the host: shapes depend on B and T alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

PADDING = -1


def _number_runs(is_start: Tensor) -> Tensor:
    """Number the runs that begin where `is_start` [B, T] is true; column 0 always begins one."""
    is_start = is_start.clone()
    is_start[:, 0] = True
    return is_start.cumsum(dim=1, dtype=torch.int32) - 1


def document_ids_from_eos(tokens: Tensor, eos_id: int) -> Tensor:
    """Number the documents of each row; an end-of-text token belongs to the one it closes.

    tokens: [B, T] int. Returns [B, T] int32: [5 6 E 7 E 8] -> [0 0 0 1 1 2].
    """
    is_start = torch.zeros_like(tokens, dtype=torch.bool)
    is_start[:, 1:] = tokens[:, :-1] == eos_id
    return _number_runs(is_start)


def document_ids_from_positions(positions: Tensor) -> Tensor:
    """Number the runs of positions that go up by exactly one; negative positions are padding.

    positions: [B, T] int; a row may start anywhere. Returns [B, T] int32:
    [4 5 6 0 1 2 3 7 8] -> [0 0 0 1 1 1 1 2 2], and [0 1 -1 -1 0] -> [0 0 -1 -1 1].
    """
    is_padding = positions < 0
    is_start = torch.ones_like(positions, dtype=torch.bool)
    is_start[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | is_padding[:, :-1]
    # Padding opens no document, so that the ids of real documents have no gaps.
    ids = (is_start & ~is_padding).cumsum(dim=1, dtype=torch.int32) - 1
    return ids.masked_fill(is_padding, PADDING)


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Number the documents that begin at cumulative lengths; what follows the last is padding.

    cu_seqlens: [B, n + 1] int, rows like [0, 3, 7, 7], repeated entries being empty documents
        (which get no id). Returns [B, seq_len] int32.
    """
    columns = torch.arange(seq_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    columns = columns.expand(len(cu_seqlens), seq_len).contiguous()
    # How many documents have ended at or before each column, empty ones not counted.
    is_empty = cu_seqlens[:, 1:] == cu_seqlens[:, :-1]
    raw_id = torch.searchsorted(cu_seqlens[:, 1:].contiguous(), columns, right=True)
    empty_before = torch.nn.functional.pad(is_empty.cumsum(dim=1), (1, 0))
    ids = raw_id - empty_before.gather(1, raw_id.clamp(max=is_empty.shape[1]))
    return ids.masked_fill(columns >= cu_seqlens[:, -1:], PADDING).to(torch.int32)


def document_ids_from_lengths(lengths: Tensor, seq_len: int) -> Tensor:
    """Number documents of the given lengths, laid end to end; the rest of a row is padding.

    lengths: [B, n] int, filled up with zeros where a row has fewer documents. A 1-D tensor is
        one row. Returns [B, seq_len] int32: lengths [[2, 3]], seq_len 6 -> [[0 0 1 1 1 -1]].
    """
    if lengths.dim() == 1:
        lengths = lengths[None]
    return document_ids_from_cu_seqlens(
        torch.nn.functional.pad(lengths.cumsum(dim=1), (1, 0)), seq_len
    )


def document_starts(document_ids: Tensor) -> Tensor:
    """For each token, the column where its document begins; a padding token is its own.

    document_ids: [B, T] int. Returns [B, T] int32, never decreasing along a row: a query at
    column q may look at key column k if and only if starts[q] <= k <= q.
    """
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]) | (
        document_ids[:, 1:] == PADDING
    )
    columns = torch.arange(document_ids.shape[1], device=document_ids.device, dtype=torch.int32)
    return torch.where(is_start, columns, 0).cummax(dim=1).values


class DocumentSeparator(Protocol):
    """Reads document ids out of a batch."""

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        """Return [B, T] int32 ids for a batch such as {"input": [B, T], "positions": [B, T]}.

        Raises ValueError if the batch lacks the entry that this separator reads.
        """
        ...


def _entry(batch: Mapping[str, Any], *keys: str) -> Tensor:
    for key in keys:
        if batch.get(key) is not None:
            return batch[key]
    raise ValueError(
        f"document boundaries are to come from {' or '.join(map(repr, keys))}, but the batch only "
        f"has {sorted(batch)}; put it into the batch or choose another model.attn_mask_type"
    )


@dataclass(frozen=True)
class EosSeparator:
    """A document ends with the end-of-text token."""

    eos_id: int

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        return document_ids_from_eos(_entry(batch, "input"), self.eos_id)


@dataclass(frozen=True)
class PositionSeparator:
    """A document ends where `positions` don't go up by one."""

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        tokens, positions = _entry(batch, "input"), _entry(batch, "positions")
        return document_ids_from_positions(positions.expand(tokens.shape))


@dataclass(frozen=True)
class LengthsSeparator:
    """Documents have the lengths of `seq_lens` [B, n], or begin at `cu_seqlens` [B, n + 1].

    A 1-D `cu_seqlens` counts through the rows of the batch laid end to end.
    """

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        n_rows, seq_len = _entry(batch, "input").shape
        if batch.get("seq_lens") is not None:
            return document_ids_from_lengths(batch["seq_lens"], seq_len)
        cu_seqlens = _entry(batch, "seq_lens", "cu_seqlens")
        if cu_seqlens.dim() == 2:
            return document_ids_from_cu_seqlens(cu_seqlens, seq_len)
        flat = document_ids_from_cu_seqlens(cu_seqlens[None], n_rows * seq_len)
        return flat.view(n_rows, seq_len)


@dataclass(frozen=True)
class DocumentIdSeparator:
    """The batch carries `document_ids` [B, T] itself."""

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        return _entry(batch, "document_ids").to(torch.int32)


def choose_separator(
    batch: Mapping[str, Any], attn_mask_type: str, eos_id: int | None
) -> DocumentSeparator:
    """Return the separator in force for a batch.

    Explicit boundaries (`document_ids`, then `seq_lens` or `cu_seqlens`) lose nothing and win;
    otherwise attn_mask_type "block_causal" means the end-of-text token and
    "position_block_causal" the positions.
    Raises ValueError if the end-of-text token is wanted and unknown.
    """
    if batch.get("document_ids") is not None:
        return DocumentIdSeparator()
    if batch.get("seq_lens") is not None or batch.get("cu_seqlens") is not None:
        return LengthsSeparator()
    if attn_mask_type == "position_block_causal":
        return PositionSeparator()
    if eos_id is None:
        raise ValueError(
            "attn_mask_type 'block_causal' needs the tokenizer's end-of-text id and there is none;"
            " give a tokenizer that has one, or put 'positions' into the batch and set "
            "model.attn_mask_type to 'position_block_causal'"
        )
    return EosSeparator(eos_id)
