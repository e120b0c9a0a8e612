"""Boundaries of documents: every kind of separator becomes one tensor of document ids.

B rows, T tokens per row. Ids are [B, T] int32, counted from 0 in each row; padding is -1. A document
is a contiguous run of one id: if an id occurs again after another id, it is a new document.

Shapes depend only on B and T, so the host reads no value from the device, except to warn of sources that
disagree, and of positions that restart in rows of one document.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchtitan.config.mask_types import END_OF_TEXT, POSITIONS, mask_type
from torchtitan.tools.host_copy import fetch, on_host
from torchtitan.tools.logging import already_said, logger
from torchtitan.tools.torch_parts import assert_on_device

PADDING = -1
IGNORE_INDEX = -100
"""No loss counts labels with this value."""

BOUNDARY_KEYS = ("document_ids", "seq_lens", "cu_seqlens")
"""Entries of a batch that give document boundaries and nothing else; the first entry present is used."""

PARENT_IDS = "parent_ids"
"""Entry of a batch that makes its documents the branches of trees; see `branch_depths`."""

SAMPLE_IDS = "sample_ids"
"""Key of the indices of a row's first and last sample, [2], which a dataset may add. The dataloader makes it
an attribute of the batch's input."""


def document_ids_from_token(tokens: Tensor, token: int, begins: bool = False) -> Tensor:
    """Number the documents of each row, each of which ends with `token` or, if `begins`, begins with it.

    tokens: [B, T] int. Returns [B, T] int32: [5 6 E 7 E 8] -> [0 0 0 1 1 2], with begins [0 0 1 1 2 2].
    """
    ids = torch.zeros_like(tokens, dtype=torch.int32)
    marks = tokens[:, 1:] if begins else tokens[:, :-1]
    ids[:, 1:] = (marks == token).cumsum(dim=1)
    return ids


def document_ids_from_positions(positions: Tensor) -> Tensor:
    """Number the runs in which positions go up by exactly one; negative positions are padding.

    positions: [B, T] int; a row may start anywhere. Returns [B, T] int32:
    [4 5 6 0 1 2 3 7 8] -> [0 0 0 1 1 1 1 2 2], and [0 1 -1 -1 0] -> [0 0 -1 -1 1].
    """
    is_padding = positions < 0
    is_start = torch.ones_like(positions, dtype=torch.bool)
    is_start[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | is_padding[:, :-1]
    ids = (is_start & ~is_padding).cumsum(dim=1, dtype=torch.int32) - 1
    return ids.masked_fill(is_padding, PADDING)


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Number the documents that cumulative lengths give; tokens after the last document are padding.

    cu_seqlens: [B, n + 1] int, rows like [0, 3, 7, 7]; a repeated entry is an empty document, which
        gets no id. Returns [B, seq_len] int32.
    Raises ValueError if lengths don't begin at 0, decrease, or exceed `seq_len`. On an accelerator they
    are not checked, because reading them waits for the device; documents are cut off at `seq_len`.
    """
    if cu_seqlens.device.type == "cpu":
        lengths = torch.nn.functional.pad(cu_seqlens, (1, 0)).diff(dim=1)
        too_long = (cu_seqlens[:, -1] > seq_len).any()
        if too_long or (lengths[:, 0] != 0).any() or (lengths < 0).any():
            raise ValueError(
                "document lengths ('seq_lens') must not be negative, and cumulative lengths ('cu_seqlens') "
                f"must go up from 0 to {seq_len} tokens at most, got {int(cu_seqlens[:, 0].max())} to "
                f"{int(cu_seqlens[:, -1].max())}, with a shortest document of {int(lengths.min())} tokens; "
                "truncate them to the row, pad lengths with 0, and pad cumulative lengths with their last entry"
            )
    columns = torch.arange(seq_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    columns = columns.expand(len(cu_seqlens), seq_len).contiguous()
    # A column's id is the number of non-empty documents that end at or before the column.
    is_empty = cu_seqlens[:, 1:] == cu_seqlens[:, :-1]
    raw_id = torch.searchsorted(cu_seqlens[:, 1:].contiguous(), columns, right=True)
    empty_before = torch.nn.functional.pad(is_empty.cumsum(dim=1), (1, 0))
    ids = raw_id - empty_before.gather(1, raw_id.clamp(max=is_empty.shape[1]))
    return ids.masked_fill(columns >= cu_seqlens[:, -1:], PADDING).to(torch.int32)


def document_ids_from_lengths(lengths: Tensor, seq_len: int) -> Tensor:
    """Number documents of the given lengths, laid end to end; the rest of a row is padding.

    lengths: [B, n] int, zeros after a row's last document; 1-D for one row. Returns [B, seq_len] int32:
    lengths [[2, 3]], seq_len 6 -> [[0 0 1 1 1 -1]].
    """
    ends = torch.atleast_2d(lengths).cumsum(dim=1)
    return document_ids_from_cu_seqlens(torch.nn.functional.pad(ends, (1, 0)), seq_len)


def document_ids_from_padding_mask(mask: Tensor) -> Tensor:
    """Return ids of one document per row, and padding where `mask` is zero.

    mask: [B, T], zeros at a row's beginning, its end or both. Returns [B, T] int32:
    [[1 1 1 0 0]] -> [[0 0 0 -1 -1]]. Raises ValueError for zeros between tokens; on an accelerator the
    check runs on the device and stops the process.
    """
    is_token = mask != 0
    runs = (is_token[:, 1:] & ~is_token[:, :-1]).sum(dim=1) + is_token[:, 0]
    message = (
        "a padding mask has its zeros at the beginning or the end of a row, got some between "
        "tokens; pack documents with 'positions' or 'document_ids' instead"
    )
    if mask.device.type != "cpu":
        assert_on_device((runs <= 1).all(), message)
    elif (runs > 1).any():
        raise ValueError(message)
    return torch.where(is_token, 0, PADDING).to(torch.int32)


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the column where each token's document begins; a padding token is a document of its own.

    document_ids: [B, T] int. Returns [B, T] int32, never decreasing along a row: a query at
    column q may look at key column k if and only if starts[q] <= k <= q.
    """
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]) | (
        document_ids[:, 1:] == PADDING
    )
    columns = torch.arange(document_ids.shape[1], device=document_ids.device, dtype=torch.int32)
    return torch.where(is_start, columns, 0).cummax(dim=1).values


def positions_from_document_ids(document_ids: Tensor) -> Tensor:
    """Return each token's position in its document, from 0; padding gets -1.

    document_ids: [B, T] int. Returns [B, T] int64: [0 0 0 1 -1 2 2] -> [0 1 2 0 -1 0 1].
    """
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    positions = columns - document_starts(document_ids)
    return positions.masked_fill(document_ids == PADDING, PADDING)


def last_tokens(document_ids: Tensor) -> Tensor:
    """Return bool [B, T]: True where the next token of the row belongs to another document.

    True for padding. A real token in the last column gets False, because the next row is unknown.
    """
    is_last = document_ids == PADDING
    is_last[:, :-1] |= document_ids[:, 1:] != document_ids[:, :-1]
    return is_last


# ---- trees of documents ----


def branch_depths(document_ids: Tensor, parent_ids: Tensor) -> Tensor | None:
    """Return each token's position on its branch, [B, T] int32 on the host; None if no document has a parent.

    A document with a parent continues after the parent's last token, with the positions that follow. A
    branch is a document with its ancestors. Padding gets -1.
    document_ids: [B, T]. parent_ids: [B, T], the id of the parent of each token's document, -1 for none:
    ids [0 0 1 2 2], parents [-1 -1 0 0 0] -> [0 1 2 2 3].
    Waits for the device if the host has no copy. Raises ValueError unless a parent is the document just
    before, or an ancestor of that document: a tree's documents must be contiguous.
    """
    ids, parents = fetch(document_ids), fetch(parent_ids)
    is_token, seq_len = ids != PADDING, ids.shape[1]
    if not (is_token & (parents != PADDING)).any():
        return None
    firsts = document_starts(ids).long()
    changes = is_token & (parents != parents.gather(1, firsts))
    if changes.any():
        row, column = changes.nonzero()[0].tolist()
        raise ValueError(
            f"all tokens of a document must have one parent in 'parent_ids', got "
            f"{int(parents[row, column])} at token {column} of row {row}, whose document "
            f"{int(ids[row, column])} begins with {int(parents[row, firsts[row, column]])}"
        )
    firsts = firsts + torch.arange(len(ids), device="cpu")[:, None] * seq_len
    documents, lengths = firsts[is_token].unique_consecutive(return_counts=True)
    # The last document and its ancestors: (document's id, branch length up to the document's end).
    branch: list[tuple[int, int]] = []
    bases, last_end = [], -1
    of_documents = (x.flatten()[documents].tolist() for x in (ids, parents))
    for first, length, own, parent in zip(
        documents.tolist(), lengths.tolist(), *of_documents, strict=True
    ):
        if parent == PADDING or first != last_end or first % seq_len == 0:
            branch = []
        while branch and branch[-1][0] != parent:
            branch.pop()
        if parent != PADDING and not branch:
            raise ValueError(
                f"document {own} at token {first % seq_len} of row {first // seq_len} has parent {parent} in "
                "'parent_ids', which must be the document before it or an ancestor of that document, without "
                "padding between; lay out trees with batch.trees.tree_batch"
            )
        bases.append(branch[-1][1] if branch else 0)
        branch.append((own, bases[-1] + length))
        last_end = first + length
    depths = positions_from_document_ids(ids).to(torch.int32)
    depths[is_token] += torch.tensor(bases, dtype=torch.int32).repeat_interleave(lengths)
    return depths


def follow_branches(depths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ends [B, T], begins [B, T], paths [n]) of the result of `branch_depths`, on the host.

    ends: for each token, the last column whose token sees it. paths: column indices, branch after branch; a
    token sees the columns paths[begins : begins + depth + 1], the last of which is the token's own. A padding
    token sees only itself.
    """
    n_rows, seq_len = depths.shape
    ends, begins = (torch.empty((n_rows, seq_len), dtype=torch.int32) for _ in range(2))
    paths: list[Tensor] = []
    n_listed = 0
    for of_row, ends_of_row, begins_of_row in zip(depths, ends, begins, strict=True):
        branch = torch.empty(seq_len, dtype=torch.int32)  # columns of the current branch
        length = 0
        is_padding = of_row < 0
        # A stretch is padding, or a contiguous part of one branch.
        begins_stretch = (of_row[1:] != of_row[:-1] + 1) | is_padding[:-1]
        begins_stretch &= ~(is_padding[1:] & is_padding[:-1])
        bounds = [0, *(begins_stretch.nonzero().flatten() + 1).tolist(), seq_len]
        for start, end in pairwise(bounds):
            depth = max(int(of_row[start]), 0)
            columns = torch.arange(start, end, dtype=torch.int32)
            ends_of_row[branch[depth:length].long()] = start - 1
            branch[depth : depth + end - start] = columns
            length = depth + end - start
            begins_of_row[start:end] = n_listed
            if is_padding[start]:
                ends_of_row[start:end] = columns
                begins_of_row[start:end] += columns - start
                paths.append(columns)
                length = 0
            else:
                paths.append(branch[:length].clone())
            n_listed += len(paths[-1])
        ends_of_row[branch[:length].long()] = seq_len - 1
    return ends, begins, torch.cat(paths)


def ids_of_branches(depths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (document ids, parent ids) [B, T] for positions on branches: the inverse of `branch_depths`."""
    _, begins, paths = follow_branches(depths)
    columns = torch.arange(depths.shape[1], dtype=torch.int32).expand(depths.shape)
    is_token, has_parent = depths >= 0, depths > 0
    before = torch.where(has_parent, paths[(begins + depths - 1).clamp(min=0)], -1).long()
    begins_branch = has_parent & (before != columns - 1)
    is_first = is_token & (~has_parent | begins_branch)
    rows, _ = begins_branch.nonzero(as_tuple=True)
    is_first[rows, before[begins_branch] + 1] = True  # a document ends where a branch leaves it
    ids = (is_first.cumsum(dim=1) - 1).masked_fill(~is_token, PADDING)
    first = torch.where(is_first, columns, 0).cummax(dim=1).values.long()
    parents = ids.gather(1, before.clamp(min=0)).masked_fill(before < 0, PADDING)
    return ids, parents.gather(1, first).masked_fill(~is_token, PADDING)


# ---- reading a batch ----


def per_token(batch: Mapping[str, Any], key: str) -> Tensor:
    """Return an entry [B, T], or a shared row [1, T], as [B, T]; raises ValueError for another shape."""
    (n_rows, seq_len), values = batch["input"].shape[:2], batch[key]
    if tuple(values.shape) not in ((n_rows, seq_len), (1, seq_len)):
        raise ValueError(
            f"the batch's {key!r} must have the shape of its 'input', {(n_rows, seq_len)}, or "
            f"{(1, seq_len)} for all rows, got {tuple(values.shape)}; give one entry per token"
        )
    return values.expand(n_rows, seq_len)


def _read(batch: Mapping[str, Any], source: str) -> Tensor:
    """Return the document ids [B, T] from one source of boundaries."""
    (n_rows, seq_len), values = batch["input"].shape, batch[source]
    if source == "document_ids":
        return per_token(batch, source).to(torch.int32)
    if source == "positions":
        return document_ids_from_positions(per_token(batch, source))
    # 1-D cumulative lengths span the concatenated rows.
    if values.dim() == 1 and source == "cu_seqlens":
        ids = document_ids_from_cu_seqlens(values[None], n_rows * seq_len)
        return ids.view(n_rows, seq_len)
    if values.dim() == 1 == n_rows:
        values = values[None]
    # Refuse one row of lengths [1, n] for several rows: they might be meant for the flattened batch.
    if values.dim() != 2 or len(values) != n_rows:
        raise ValueError(
            f"the batch's {source!r} must have a row for each of the {n_rows} rows of its 'input', got "
            f"shape {tuple(values.shape)}; give each row its documents, padded to the longest list"
        )
    number = document_ids_from_lengths if source == "seq_lens" else document_ids_from_cu_seqlens
    return number(values, seq_len)


def boundaries_on_host(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with the host's copies of tokens and boundaries; unchanged if a copy is missing."""
    copies = {
        key: on_host(batch[key])
        for key in ("input", "positions", PARENT_IDS, *BOUNDARY_KEYS)
        if batch.get(key) is not None
    }
    is_on_host = all(x.device.type == "cpu" for x in copies.values())
    return {**batch, **copies} if is_on_host else batch


def read_document_ids(batch: Mapping[str, Any], attn_mask_type: str, token: int | None) -> Tensor:
    """Return the document ids [B, T] int32 of a batch, from one source of boundaries.

    Explicit boundaries are used first (`document_ids`, then `seq_lens`, then `cu_seqlens`), then the
    mask type's source, or end-of-text tokens if the mask type has no source. token: see `boundary_token`.

    Warns once per engine if the batch has a second source, and once if the two sources disagree, with
    the first token where they differ. Positions and end-of-text tokens have other uses: as a second
    source they cause a warning only if they disagree. On an accelerator only the first such batch is
    compared, because comparing waits for the device. Raises ValueError if the batch lacks the source, if
    a token is needed and its id unknown, and if a source does not fit the shape of the input.
    """
    of_type = mask_type(attn_mask_type)
    if not of_type.source:
        of_type = END_OF_TEXT
    source = next((key for key in BOUNDARY_KEYS if batch.get(key) is not None), of_type.source)
    if source != of_type.source or of_type.token is None:
        if batch.get(source) is None:
            raise ValueError(
                f"attn_mask_type {attn_mask_type!r} reads document boundaries from {source!r},"
                f" and the batch has only {sorted(batch)}; put {source!r} [B, T] into it, or set "
                "model.attn_mask_type to 'block_causal', which reads the end-of-text tokens"
            )
        document_ids = _read(batch, source)
    elif token is None:
        raise ValueError(
            f"document boundaries are read from {source}, and the tokenizer is None or has no "
            f"{of_type.token}; set `engine.tokenizer`, which an engine does not load itself, or put "
            "'positions' into the batch and set model.attn_mask_type to 'position_block_causal'"
        )
    else:
        document_ids = document_ids_from_token(batch["input"], token, of_type.begins)
    for other in (*BOUNDARY_KEYS, "positions"):
        if other != source and batch.get(other) is not None:
            _warn_of_second_source(source, document_ids, other, partial(_read, batch, other))
    if source == POSITIONS and token is not None:
        read = partial(_read_end_of_text, batch["input"], token, document_ids)
        _warn_of_second_source(source, document_ids, END_OF_TEXT.source, read)
    return document_ids


_READINGS = ("continues a document", "begins a document", "is padding")


def _read_end_of_text(tokens: Tensor, eos_id: int, document_ids: Tensor) -> Tensor:
    """Return document ids [B, T] from end-of-text tokens; rows without this token keep `document_ids`."""
    ids = document_ids_from_token(tokens, eos_id).masked_fill(document_ids == PADDING, PADDING)
    return torch.where((tokens == eos_id).any(dim=1, keepdim=True), ids, document_ids)


def _is_to_compare(pair: tuple[str, str], x: Tensor) -> bool:
    """Return True if the two sources should be compared. On an accelerator each pair is compared once."""
    said = already_said()
    is_new = pair not in said
    said.add(pair)
    return (pair, "disagree") not in said and (is_new or x.device.type == "cpu")


def _warn_of_second_source(
    name: str, document_ids: Tensor, other: str, read_other: Callable[[], Tensor]
) -> None:
    pair = (name, other)
    is_new = pair not in already_said()
    if not _is_to_compare(pair, document_ids):
        return
    theirs = read_other()
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    # Compare what each token is (an index into `_READINGS`): sources may number documents differently.
    readings = [
        (document_starts(ids) == columns).long().masked_fill(ids == PADDING, 2)
        for ids in (document_ids, theirs)
    ]
    differs = readings[0] != readings[1]
    disagree = bool(differs.any())
    message = f"document boundaries come from {name!r}; the {other!r} of the batch are ignored"
    if disagree:
        already_said().add((pair, "disagree"))
        row, index = differs.nonzero()[0].tolist()
        own_reading, other_reading = (_READINGS[int(reading[row, index])] for reading in readings)
        message += (
            f", and they disagree: in row {row} token {index} {own_reading} by {name!r} and "
            f"{other_reading} by {other!r}"
        )
    if disagree or (is_new and other in BOUNDARY_KEYS):
        logger.warning(message)


def warn_of_restarts(positions: Tensor) -> None:
    """Warn once per engine if positions [B, T] restart although attention treats each row as one document.

    Gaps and negative positions, which are padding, are not restarts.
    """
    pair = ("causal", "positions")
    positions = on_host(positions)
    if not _is_to_compare(pair, positions):
        return
    highest_before = positions.cummax(dim=1).values[:, :-1]
    restarts = (positions[:, 1:] >= 0) & (positions[:, 1:] <= highest_before)
    if restarts.any():
        already_said().add((pair, "disagree"))
        row, index = restarts.nonzero()[0].tolist()
        logger.warning(
            f"the batch's 'positions' restart in row {row} at token {index + 1}, but under "
            "model.attn_mask_type = 'causal' that token sees the whole row before it; set it to "
            "'position_block_causal', with model.attn_type 'flex' or 'varlen', to keep documents apart"
        )
