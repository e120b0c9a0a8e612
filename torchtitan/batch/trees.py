"""Rows of trees: sequences that begin with the same tokens share the computation of these tokens.

A slot is an input token with its label, the token after it. Sequences share slots as long as tokens and
labels agree, so a branch begins with its own copy of the last common token, whose label differs:

    sequences  a b c d     slots   a b | c | c        documents 0 0 1 2, parents -1 -1 0 0
               a b c e     labels  b c   d   e        positions 0 1 2 2

A slot is shared only if at most one sequence scores it, so every scored label is counted once, by its sequence.

B rows, T slots per row.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.batch.batch import Batch
from torchtitan.batch.documents import IGNORE_INDEX, PADDING, PARENT_IDS, ids_of_branches


class Tree(NamedTuple):
    """Sequences that are laid out together; one sequence by itself is a tree, too.

    sequences: indices of the sequences. shared: for each sequence, the number of leading slots that it
    shares with the sequence before it. size: the tree's number of slots.
    """

    sequences: list[int]
    shared: list[int]
    size: int


def lone_trees(lengths: Sequence[int]) -> list[Tree]:
    """Return a tree of its own for each sequence."""
    return [Tree([i], [0], length) for i, length in enumerate(lengths)]


def grow_trees(
    tokens: Sequence[Tensor],
    labels: Sequence[Tensor],
    is_scored: Sequence[Tensor],
    seq_len: int,
    groups: Sequence[Hashable] | None = None,
    routed_experts: Sequence[Tensor] | None = None,
) -> list[Tree]:
    """Return trees of at most `seq_len` slots, whose sequences (of at most `seq_len`) share leading slots.

    tokens, labels, is_scored: [n] for each sequence. IGNORE_INDEX agrees with any label.
    groups: only sequences of one group share a tree. routed_experts: [n, L, k] for each sequence, which must
    agree at shared slots.
    """
    values = [
        [x.numpy() for x in (own, *others)]
        for own, *others in zip(
            tokens, labels, is_scored, *filter(None, [routed_experts]), strict=True
        )
    ]
    group_of = list(groups) if groups is not None else [None] * len(values)
    # Sorted by their bytes, sequences with the same first tokens are neighbours.
    in_order = sorted(
        range(len(values)), key=lambda i: (str(group_of[i]), values[i][0].astype(">i8").tobytes())
    )
    trees: list[Tree] = []
    # Tokens, labels, scored flags and experts of the previous sequence. In slots that it shares with earlier
    # sequences of its tree, the labels and flags of all these sequences are merged.
    branch: list[Any] = []
    for i in in_order:
        own, own_labels, own_scored, *own_experts = values[i]
        shared = 0
        if trees and group_of[trees[-1].sequences[-1]] == group_of[i]:
            n = min(len(own), len(branch[0]))
            known = own_labels[:n], branch[1][:n]
            agrees = (own[:n] == branch[0][:n]) & ~(own_scored[:n] & branch[2][:n])
            agrees &= (
                (known[0] == known[1]) | (known[0] == IGNORE_INDEX) | (known[1] == IGNORE_INDEX)
            )
            for one, other in zip(own_experts, branch[3:], strict=True):
                agrees &= (one[:n] == other[:n]).all(axis=(1, 2))
            shared = n if agrees.all() else int(agrees.argmin())
        if shared and trees[-1].size + len(own) - shared <= seq_len:
            # A shared slot is scored if any of its sequences scores it, and labelled if any has a label.
            own_scored, own_labels = own_scored.copy(), own_labels.copy()
            own_scored[:shared] |= branch[2][:shared]
            ignored = own_labels[:shared] == IGNORE_INDEX
            own_labels[:shared][ignored] = branch[1][:shared][ignored]
            last = trees[-1]
            last.sequences.append(i)
            last.shared.append(shared)
            trees[-1] = last._replace(size=last.size + len(own) - shared)
        else:
            trees.append(Tree([i], [0], len(own)))
        branch = [own, own_labels, own_scored, *own_experts]
    return sorted(trees, key=lambda tree: min(tree.sequences))


def columns_of(trees: Iterable[Tree], lengths: Sequence[int]) -> dict[int, Tensor]:
    """Return sequence index -> columns of its slots, int64 [n], if a row holds these trees one after another.

    lengths: numbers of slots of all sequences.
    """
    branch, end = torch.empty(0, dtype=torch.int64), 0
    columns = {}
    for tree in trees:
        for sequence, shared in zip(tree.sequences, tree.shared, strict=True):
            start, end = end, end + lengths[sequence] - shared
            columns[sequence] = branch = torch.cat((branch[:shared], torch.arange(start, end)))
    return columns


def fill_rows(
    sizes: Sequence[int], seq_len: int, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Return the items of each row, as indices into `sizes`, by first fit, largest item first.

    A row has items of one group. An item larger than `seq_len` gets a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = (i for i, free in enumerate(room) if free >= sizes[item])
        is_ours = (i for i in fitting if groups is None or groups[rows[i][0]] == groups[item])
        row = next(is_ours, len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[row].append(item)
        room[row] -= sizes[item]
    return rows


# ---- for callers of the engine ----


@dataclass(frozen=True)
class TreeBatch:
    """The result of `tree_batch`. places: the row and the columns [n] of each sequence's slots."""

    batch: Batch
    places: list[tuple[int, Tensor]]

    def of_sequences(self, values: Tensor) -> list[Tensor]:
        """Split outputs [B, T, ...] by sequence, [n, ...] each; values of shared slots are repeated.

        Slot t of a sequence predicts its token t + 1. Outside the sequence's continuation, log-probs are 0
        or belong to a continuation of another sequence: mask them.
        """
        return [values[row, columns.to(values.device)] for row, columns in self.places]


def tree_batch(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], seq_len: int
) -> TreeBatch:
    """Return a batch of rows of at most `seq_len` slots, for the sequences prompt + continuation.

    prompts, continuations: token ids of each sequence, never empty. A prompt may equal another prompt, or begin
    with another sequence. Labels are the continuations' tokens, and IGNORE_INDEX at all other slots; a token
    in several continuations is scored once in each. The last token of a sequence is only a label.
    Raises ValueError for an empty prompt or continuation, and for a sequence that does not fit a row.
    """
    tokens, labels = [], []
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        whole = torch.tensor([*prompt, *continuation])
        if not len(prompt) or not len(continuation) or len(whole) - 1 > seq_len:
            raise ValueError(
                f"a sequence needs a prompt and a continuation of together at most seq_len + 1 = {seq_len + 1} "
                f"tokens, got {len(prompt)} and {len(continuation)} for sequence {i}; truncate it, or raise seq_len"
            )
        tokens.append(whole[:-1])
        labels.append(whole[1:].clone())
        labels[-1][: len(prompt) - 1] = IGNORE_INDEX
    trees = grow_trees(tokens, labels, [x != IGNORE_INDEX for x in labels], seq_len)
    rows = fill_rows([tree.size for tree in trees], seq_len)
    width = max((sum(trees[i].size for i in row) for row in rows), default=0)
    filled = {"input": 0, "labels": IGNORE_INDEX, "positions": PADDING}
    of_slots = {key: torch.full((len(rows), width), x) for key, x in filled.items()}
    places: list[Any] = [None] * len(tokens)
    lengths = [len(x) for x in tokens]
    for row, members in enumerate(rows):
        for i, columns in columns_of((trees[tree] for tree in members), lengths).items():
            places[i] = row, columns
            of_slots["input"][places[i]] = tokens[i]
            of_slots["positions"][places[i]] = torch.arange(lengths[i])
            is_scored = labels[i] != IGNORE_INDEX
            of_slots["labels"][row, columns[is_scored]] = labels[i][is_scored]
    document_ids, parent_ids = ids_of_branches(of_slots["positions"])
    batch: Any = {**of_slots, "document_ids": document_ids, PARENT_IDS: parent_ids}
    return TreeBatch(batch, places)
