"""Packings, and the batches that carry them.

A packing says how rows of T tokens are made up of documents and padding. It can be written into
a batch in six ways (`SEPARATORS`).

A padding token looks at itself alone, so here it counts as a document of one token.
"""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchtitan.testing.isolation import Spans

EOS_ID = 0
VOCAB_SIZE = 32
LARGEST_FIRST_POSITION = 40

SEPARATORS = {
    # name: the model.attn_mask_type under which a batch of this kind is read
    "eos": "block_causal",
    "positions": "position_block_causal",
    "seq_lens": "block_causal",
    "cu_seqlens": "position_block_causal",
    "cu_seqlens of the batch": "block_causal",
    "document_ids": "position_block_causal",
}


class Segment(NamedTuple):
    """A document, whose first token stands at `first_position`, or padding (None)."""

    length: int
    first_position: int | None = 0


Packing: TypeAlias = tuple[tuple[Segment, ...], ...]
"""Rows of segments; all rows have one length."""


def spans_of(packing: Packing) -> Spans:
    """Where the documents of a packing are."""
    rows = []
    for row in packing:
        lengths = [length for segment in row for length in _as_document_lengths(segment)]
        rows.append(list(pairwise([0, *accumulate(lengths)])))
    return rows


def _as_document_lengths(segment: Segment) -> list[int]:
    if segment.first_position is None:
        return [1] * segment.length
    return [segment.length]


# ---- writing a packing into a batch ----


def make_batch(packing: Packing, separator: str, rng: random.Random) -> dict[str, Tensor]:
    """Return {"input": [B, T], ...} whose boundaries are those of `packing`."""
    n_tokens = sum(segment.length for segment in packing[0])
    tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(n_tokens)] for _ in packing]
    if separator == "eos":
        return {"input": torch.tensor([_tokens_with_eos(row, rng) for row in packing])}
    batch = {"input": torch.tensor(tokens)}  # end-of-text tokens in them mean nothing
    if separator == "positions":
        batch["positions"] = torch.tensor([_positions(row, rng) for row in packing])
    elif separator == "document_ids":
        batch["document_ids"] = torch.tensor([_document_ids(row, rng) for row in packing])
    elif separator == "seq_lens":
        batch["seq_lens"] = _filled_up([_lengths(row, rng) for row in packing], longer=True)
    elif separator == "cu_seqlens":
        cumulative = [[0, *accumulate(_lengths(row, rng))] for row in packing]
        batch["cu_seqlens"] = _filled_up(cumulative, longer=False)
    elif separator == "cu_seqlens of the batch":
        rows = [*(_lengths(row, rng, to_the_end=True) for row in packing[:-1])]
        flat = [length for row in [*rows, _lengths(packing[-1], rng)] for length in row]
        batch["cu_seqlens"] = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
    return batch


def _tokens_with_eos(row: Sequence[Segment], rng: random.Random) -> list[int]:
    """Documents end with the end-of-text token, the row's last one perhaps; padding is of it."""
    tokens: list[int] = []
    for segment in row:
        if segment.first_position is None:
            tokens += [EOS_ID] * segment.length
        else:
            tokens += [rng.randrange(1, VOCAB_SIZE) for _ in range(segment.length - 1)] + [EOS_ID]
    if row[-1].first_position is not None and rng.random() < 0.5:
        tokens[-1] = rng.randrange(1, VOCAB_SIZE)
    return tokens


def _positions(row: Sequence[Segment], rng: random.Random) -> list[int]:
    positions: list[int] = []
    for length, first in row:
        if first is None:
            positions += [-rng.randint(1, 3) for _ in range(length)]
            continue
        if positions and positions[-1] >= 0 and first == positions[-1] + 1:
            first = 0  # would read as one document
        positions += range(first, first + length)
    return positions


def _document_ids(row: Sequence[Segment], rng: random.Random) -> list[int]:
    """Few labels, so that many come back after another one."""
    ids: list[int] = []
    for segment in row:
        label = -1
        if segment.first_position is not None:
            label = rng.choice([i for i in range(3) if not ids or i != ids[-1]])
        ids += [label] * segment.length
    return ids


def _lengths(row: Sequence[Segment], rng: random.Random, to_the_end: bool = False) -> list[int]:
    """Document lengths, some of them 0; padding at the end is left out unless `to_the_end`."""
    row = list(row)
    while row and row[-1].first_position is None and not to_the_end:
        row.pop()
    lengths: list[int] = []
    for segment in row:
        lengths += [0] if rng.random() < 0.1 else []
        lengths += _as_document_lengths(segment)
    return lengths


def _filled_up(rows: list[list[int]], longer: bool) -> Tensor:
    """[B, n] of unequal rows: zeros follow lengths, the last entry again follows cumulative ones."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([row + [0 if longer else row[-1]] * (width - len(row)) for row in rows])
