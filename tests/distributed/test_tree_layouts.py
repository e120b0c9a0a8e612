"""Rows of trees give, in every layout, the loss and gradients of one process with a row per sequence."""

import dataclasses
import random

import pytest
import torch
from torch.nn import functional as F

from tests.distributed.layout_matrix import (
    BY_NAME,
    ONE_PROCESS,
    ROWS,
    SEQ_LEN,
    SHALLOW,
    VOCAB,
    batch_flags,
    build_engine,
    gradients_of,
)
from torchtitan.batch.documents import IGNORE_INDEX, PADDING
from torchtitan.batch.trees import tree_batch
from torchtitan.distributed.utils import dist_sum
from torchtitan.testing.gloo import run_ranks

IN_CI = ["CP 2", "PP 2, 1F1B"]
SLOW = ["FSDP 2", "TP 2", "CP 2, alltoall, full AC", "FSDP 2, CP 2", "TP 2, PP 2, ZBVZeroBubble"]
BATCHES, MORE_BATCHES = 1, 25
FAMILIES = [("llama3", "documents, varlen"), ("gpt_oss", "documents, flex")]


def sequences(seed):
    """Return, for each row, (prompts, continuations) of dialogues whose turns branch."""
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(VOCAB) for _ in range(n)]

    rows = []
    for _ in range(ROWS):
        history = tokens(rng.randint(2, 7))
        prompts, continuations = [], []
        for _ in range(2):  # turns
            prompts += [history] * 2
            continuations += [tokens(rng.randint(2, 4)) for _ in range(2)]
            history = history + continuations[-1] + tokens(2)
        rows.append((prompts, continuations))
    return rows


def filled(batch):
    """Return a row of `tree_batch` filled up to SEQ_LEN."""
    padding = {"labels": IGNORE_INDEX, "positions": PADDING, "document_ids": PADDING}
    padding |= {"parent_ids": PADDING, "input": 0}
    assert len(batch["input"]) == 1, "a tree fits a row"
    n_more = SEQ_LEN - batch["input"].shape[1]
    return {key: F.pad(x, (0, n_more), value=padding[key]) for key, x in batch.items()}


def batches_of(seed, engine, is_separate):
    """Return (a rank's rows of trees, or a batch per sequence; the number of labels of all ranks)."""
    rows = sequences(seed)
    trees = [tree_batch(*row, seq_len=SEQ_LEN).batch for row in rows]
    num_valid = sum(int((x["labels"] != IGNORE_INDEX).sum()) for x in trees)
    if not is_separate:
        joined = {key: torch.cat([filled(x)[key] for x in trees]) for key in trees[0]}
        n_rows = ROWS // engine.dp_size
        own = slice(engine.dp_rank * n_rows, (engine.dp_rank + 1) * n_rows)
        return {key: x[own] for key, x in joined.items()}, num_valid
    batches = []
    for prompt, continuation in (pair for row in rows for pair in zip(*row, strict=True)):
        tokens = torch.tensor([*prompt, *continuation])[None]
        labels = tokens[:, 1:].clone()
        labels[:, : len(prompt) - 1] = IGNORE_INDEX
        positions = torch.arange(labels.shape[1])[None]
        batches.append({"input": tokens[:, :-1], "positions": positions, "labels": labels})
    return batches, num_valid


def results_on_rank(layout, family, rows_of, folder, n_batches, is_separate):
    """Return (loss, gradients) of each batch."""
    flags = [*layout.overrides(), *batch_flags(family, rows_of), "--optimizer.lr=0"]
    if "ZBV" not in layout.name:
        flags.append(SHALLOW)
    engine = build_engine(family, flags, folder)
    results = []
    for seed in range(n_batches):
        batches, num_valid = batches_of(seed, engine, is_separate)
        loss = engine.forward_backward_step(input_dict=batches, global_valid_tokens=num_valid)
        loss = dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))
        results.append((loss, gradients_of(engine)))
        engine.optimizers.zero_grad()
    engine.close()
    return results


@pytest.fixture(scope="module")
def separate_rows(tmp_path_factory):
    """(family, layout, batches) -> losses and gradients of one process."""
    known = {}

    def find(family, rows_of, layout, n_batches):
        key = family, "ZBV" in layout.name, n_batches
        if key not in known:
            one = dataclasses.replace(ONE_PROCESS, name=layout.name)  # which chooses the layers
            given = one, family, rows_of, str(tmp_path_factory.mktemp("one")), n_batches, True
            (known[key],) = run_ranks(results_on_rank, 1, *given)
        return known[key]

    return find


@pytest.mark.parametrize(
    ("name", "n_batches"),
    [
        *((name, BATCHES) for name in IN_CI),
        *(pytest.param(x, MORE_BATCHES, marks=pytest.mark.slow) for x in [*IN_CI, *SLOW]),
    ],
)
def test_trees_give_loss_and_gradients_of_separate_rows(name, n_batches, separate_rows, tmp_path):
    layout = BY_NAME[name]
    for family, rows_of in FAMILIES:
        given = layout, family, rows_of, str(tmp_path), n_batches, False
        ranks = run_ranks(results_on_rank, layout.world_size, *given)
        expected_results = separate_rows(family, rows_of, layout, n_batches)
        for (expected_loss, expected), *found in zip(expected_results, *ranks, strict=True):
            assert [loss for loss, _ in found] == pytest.approx([expected_loss] * len(ranks), 1e-6)
            assert set().union(*(of_rank for _, of_rank in found)) == expected.keys()
            # fp32: sums in another order, as shares of the largest number.
            largest = max(x.abs().max() for x in expected.values())
            for key, gradient in (item for _, of_rank in found for item in of_rank.items()):
                assert (gradient - expected[key]).abs().max() <= 1e-6 * largest, key
