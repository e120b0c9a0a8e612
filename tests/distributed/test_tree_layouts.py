"""Rows of trees give, in every layout, the log-probs, loss and gradients of one process with a row per sequence."""

import dataclasses
import random

import pytest
import torch
from torch.nn import functional as F

from tests.distributed.layout_matrix import (
    BY_NAME,
    FAMILIES,
    ONE_PROCESS,
    ROWS,
    SEQ_LEN,
    SHALLOW,
    VOCAB,
    batch_flags,
    build_engine,
    gradients_of,
    own_rows,
)
from torchtitan.batch.documents import IGNORE_INDEX, PADDING
from torchtitan.batch.trees import tree_batch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.utils import dist_sum
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.testing.gloo import run_ranks

IN_CI = ["CP 2", "PP 2, 1F1B"]
SLOW = ["1 process", "FSDP 2", "TP 2", "CP 2, alltoall, full AC", "FSDP 2, TP 2", "FSDP 2, CP 2"]
SLOW += ["CP 2, PP 2", "TP 2, PP 2, ZBVZeroBubble"]
BATCHES, MORE_BATCHES = 1, 25
CASES = [("llama3", "documents, varlen"), ("gpt_oss", "documents, flex")]
# Sums in another order, as shares of the largest number.
TOLERANCES = {"float32": 1e-6, "float64": 1e-13}


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


def batches_of(trees, rows, engine, is_separate):
    """Return a rank's rows of trees, or a batch per sequence."""
    if not is_separate:
        batches = [filled(tree.batch) for tree in trees]
        return {key: torch.cat([x[key] for x in batches])[own_rows(engine)] for key in batches[0]}
    batches = []
    for prompt, continuation in (pair for row in rows for pair in zip(*row, strict=True)):
        tokens = torch.tensor([*prompt, *continuation])[None]
        labels = tokens[:, 1:].clone()
        labels[:, : len(prompt) - 1] = IGNORE_INDEX
        positions = torch.arange(labels.shape[1])[None]
        batches.append({"input": tokens[:, :-1], "positions": positions, "labels": labels})
    return batches


def logprobs_of(outputs, trees, rows, engine, is_separate):
    """Return (row, sequence) -> log-probs of the continuation's tokens, of this rank's rows."""
    found = {}
    of_calls = iter(x.logprobs for x in outputs or ())  # None without the last stage
    of_rows = None if is_separate else next(of_calls, None)
    for row in range(ROWS)[slice(None) if is_separate else own_rows(engine)]:
        of_trees = None
        if of_rows is not None:
            of_trees = trees[row].of_sequences(of_rows[row - own_rows(engine).start][None])
        for i, (prompt, _) in enumerate(zip(*rows[row], strict=True)):
            of_sequence = next(of_calls)[0] if is_separate else of_trees and of_trees[i]
            if of_sequence is not None:
                found[row, i] = of_sequence[len(prompt) - 1 :].clone()
    return found


def compute_in_fp64():
    """Let this process compute in fp64 what it computes in fp32."""
    TORCH_DTYPE_MAP["float32"] = torch.float64
    torch.Tensor.float = torch.Tensor.double
    # Torch's grouped product refuses fp64.
    name, flavor, changes = FAMILIES["gpt_oss"]
    experts = get_train_spec(name).model_args[flavor].moe_args
    changes = changes | {"moe_args": dataclasses.replace(experts, use_grouped_mm=False)}
    FAMILIES["gpt_oss"] = name, flavor, changes


def results_on_rank(layout, family, rows_of, dtype, folder, n_batches, is_separate):
    """Return (loss, gradients and log-probs) of each batch."""
    if dtype == "float64":
        compute_in_fp64()
    flags = [*layout.overrides(), *batch_flags(family, rows_of), "--optimizer.lr=0"]
    if "ZBV" not in layout.name:
        flags.append(SHALLOW)
    engine = build_engine(family, flags, folder)
    results = []
    for seed in range(n_batches):
        rows = sequences(seed)
        trees = [tree_batch(*row, seq_len=SEQ_LEN) for row in rows]
        num_valid = sum(int((x.batch["labels"] != IGNORE_INDEX).sum()) for x in trees)
        batches = batches_of(trees, rows, engine, is_separate)
        outputs = engine.forward_step(batches, head=TokenLogProbs())
        loss = engine.forward_backward_step(input_dict=batches, global_valid_tokens=num_valid)
        loss = dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))
        logprobs = logprobs_of(outputs, trees, rows, engine, is_separate)
        results.append((loss, {**logprobs, **gradients_of(engine)}))
        engine.optimizers.zero_grad()
    engine.close()
    return results


@pytest.fixture(scope="module")
def separate_rows(tmp_path_factory):
    """(family, dtype, layout, batches) -> the results of one process."""
    known = {}

    def find(family, rows_of, dtype, layout, n_batches):
        key = family, dtype, "ZBV" in layout.name, n_batches
        if key not in known:
            one = dataclasses.replace(ONE_PROCESS, name=layout.name)  # which chooses the layers
            folder = str(tmp_path_factory.mktemp("one"))
            given = one, family, rows_of, dtype, folder, n_batches, True
            (known[key],) = run_ranks(results_on_rank, 1, *given, timeout_seconds=600)
        return known[key]

    return find


@pytest.mark.parametrize(
    ("name", "dtype", "n_batches"),
    [
        *((name, "float64", BATCHES) for name in IN_CI),
        *(
            pytest.param(name, dtype, MORE_BATCHES, marks=pytest.mark.slow)
            for dtype in TOLERANCES
            for name in [*IN_CI, *SLOW]
        ),
    ],
)
def test_trees_give_logprobs_loss_and_gradients_of_separate_rows(
    name, dtype, n_batches, separate_rows, tmp_path
):
    layout, tolerance = BY_NAME[name], TOLERANCES[dtype]
    for family, rows_of in CASES:
        given = layout, family, rows_of, dtype, str(tmp_path), n_batches, False
        ranks = run_ranks(results_on_rank, layout.world_size, *given, timeout_seconds=600)
        expected_results = separate_rows(family, rows_of, dtype, layout, n_batches)
        for (expected_loss, expected), *found in zip(expected_results, *ranks, strict=True):
            # The engine adds up losses in fp32.
            assert [loss for loss, _ in found] == pytest.approx([expected_loss] * len(ranks), 1e-6)
            assert set().union(*(of_rank for _, of_rank in found)) == expected.keys()
            largest = {str: 0.0, tuple: 0.0}  # of gradients, and of log-probs
            for key, x in expected.items():
                largest[type(key)] = max(largest[type(key)], x.abs().max())
            for key, x in (item for _, of_rank in found for item in of_rank.items()):
                assert x.dtype == getattr(torch, dtype)
                assert (x - expected[key]).abs().max() <= tolerance * largest[type(key)], key
