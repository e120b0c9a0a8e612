"""Heads and aggregated losses through the engine: layouts and splits give the step of one process.

Sequences are packed into rows of microbatches, unequally many on each data-parallel rank and
others in each layout; some ranks have none.
"""

import copy
import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.layout_matrix import (
    SHALLOW,
    VOCAB,
    Layout,
    batch_flags,
    build_engine,
    gradients_of,
)
from torchtitan.distributed.utils import dist_sum
from torchtitan.loss.aggregation import (
    LOSS_AGGREGATIONS,
    aggregation_weights,
    weighted_cross_entropy,
    weighted_sum,
)
from torchtitan.loss.cross_entropy import IGNORE_INDEX
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs, token_logprobs
from torchtitan.testing.gloo import run_ranks

NUM_SEQUENCES, NUM_PROMPTS, LONGEST, NORM = 9, 4, 9, 12.0
# fp32: the largest difference of a parameter's gradient, relative to its largest entry.
TOLERANCE = 1e-5

_NO_LOSS_PARALLEL = ("--parallelism.disable_loss_parallel",)
_ALWAYS = ("--parallelism.fsdp_reshard_after_forward=always",)
_ZERO_BUBBLE = ("--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",)
FOUR_STAGES = "llama3, as many layers as stages"
LAYOUTS = {
    2: [
        (Layout("FSDP 2", dp_shard=2), "llama3"),
        (Layout("TP 2", tp=2), "llama3"),
        (Layout("CP 2", cp=2), "llama3"),
        (Layout("PP 2", pp=2), "llama3"),
    ],
    "2, more": [
        (Layout("FSDP 2, tied, freed after forward", dp_shard=2, extra=_ALWAYS), "qwen3, tied"),
        (Layout("DDP 2", dp_replicate=2), "llama3"),
        (Layout("TP 2, tied, whole logits", tp=2, extra=_NO_LOSS_PARALLEL), "qwen3, tied"),
        (Layout("PP 2, zero bubble", pp=2, extra=_ZERO_BUBBLE), FOUR_STAGES),
    ],
    4: [
        (Layout("FSDP 4", dp_shard=4), "llama3"),
        (Layout("FSDP 2, TP 2", dp_shard=2, tp=2), "llama3"),
        (Layout("FSDP 2, PP 2", dp_shard=2, pp=2), "llama3"),
        (Layout("CP 2, TP 2", cp=2, tp=2), "llama3"),
        (Layout("CP 2, PP 2", cp=2, pp=2), "llama3"),
    ],
}


# ---- the sequences of a step, and their splits ----


def sequence(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels, mask [1 to LONGEST]; sequence 2 is fully masked."""
    generator = torch.Generator().manual_seed(i)
    length = int(torch.randint(1, LONGEST + 1, (), generator=generator))
    tokens = torch.randint(0, VOCAB, (length + 1,), generator=generator)
    mask = torch.rand(length, generator=generator) < 0.7
    return tokens[:-1], tokens[1:], mask & (i != 2)


def deal(dp_size: int) -> list[list[list[list[int]]]]:
    """For each rank its microbatches, which are rows, which are numbers of sequences."""
    split = random.Random(dp_size)
    ranks = [[[[] for _ in range(1 + m % 2)] for m in range(3 - r)] for r in range(dp_size)]
    ranks = [rank if r < 3 else [] for r, rank in enumerate(ranks)]
    rows = [row for rank in ranks for rows in rank for row in rows]
    for n, i in enumerate(split.sample(range(NUM_SEQUENCES), NUM_SEQUENCES)):
        # Every row has one, as far as they go.
        (rows[n] if n < len(rows) else split.choice(rows)).append(i)
    return ranks


def places(rows: list[list[int]]) -> Iterator[tuple[int, tuple[int, slice]]]:
    """Yield (sequence, its place in the tensors of a microbatch)."""
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            yield i, (r, slice(start, start := start + len(sequence(i)[0])))


def microbatch(rows: list[list[int]], weights: dict[int, torch.Tensor]) -> dict:
    """Rows of documents and padding, labels and weights with them."""
    ends = [0] * len(rows)
    for _, (r, where) in places(rows):
        ends[r] = where.stop
    shape = len(rows), 1 + max(ends)
    batch = {
        "input": torch.zeros(shape, dtype=torch.int64),
        "positions": torch.stack([(torch.arange(shape[1]) - end).clamp(min=0) for end in ends]),
        "labels": torch.full(shape, IGNORE_INDEX),
        "loss_weights": torch.zeros(shape),
        "temperature": torch.ones(shape),
    }
    for i, place in places(rows):
        tokens, labels, _ = sequence(i)
        batch["input"][place], batch["labels"][place] = tokens, labels
        batch["positions"][place] = torch.arange(len(tokens))
        batch["loss_weights"][place] = weights[i]
        batch["temperature"][place] = 0.5 + i / NUM_SEQUENCES
    return batch


# ---- what is measured ----


def with_entropy(outputs: TokenOutputs, labels: torch.Tensor, batch: dict) -> torch.Tensor:
    loss = weighted_cross_entropy(outputs, labels, batch)
    return loss - 0.1 * weighted_sum(outputs.entropy, batch["loss_weights"])


def with_entropy_of_logits(logits, labels, batch):
    return with_entropy(token_logprobs(logits, labels, entropy=True), labels, batch)


def of_sequences(outputs: TokenOutputs, labels: torch.Tensor, batch: dict) -> torch.Tensor:
    """A loss that is no sum over tokens: those of a sequence enter together."""
    values = (outputs.logprobs - 0.1 * outputs.entropy) * batch["loss_weights"]
    sequences = (batch["positions"] == 0).cumsum(dim=1)
    shape = len(values), values.shape[1] + 1
    return values.new_zeros(shape).scatter_add(1, sequences, values).square().sum()


def measure(layout: Layout, family: str, dump_folder: str) -> dict:
    flags = [*layout.overrides(), *batch_flags(family, "documents, varlen")]
    family, flags = ("llama3", flags) if family == FOUR_STAGES else (family, [*flags, SHALLOW])
    with build_engine(family, flags, dump_folder) as engine:
        return _measure(engine)


def _measure(engine) -> dict:
    dealt = deal(engine.dp_size)[engine.dp_rank]
    mine = [i for rows in dealt for row in rows for i in row]
    masks, prompts = [sequence(i)[2] for i in mine], [i % NUM_PROMPTS for i in mine]

    def batches(mode: str, **options) -> tuple[list[dict], float | None]:
        weights = aggregation_weights(masks, mode, norm=NORM, prompt_ids=prompts, **options)
        weights, share = (weights, None) if isinstance(weights, list) else weights
        from_sequence = dict(zip(mine, weights, strict=True))
        return [microbatch(rows, from_sequence) for rows in dealt], share

    def backward(batches: list[dict], **options) -> float:
        loss = engine.forward_backward_step(
            input_dict=batches,
            labels=[batch["labels"] for batch in batches],
            global_valid_tokens=1.0,
            **options,
        )
        return dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))

    losses, gradients = {}, {}

    def keep(name: str, loss: float) -> None:
        losses[name], gradients[name] = loss, gradients_of(engine)
        engine.optimizers.zero_grad()

    group = engine.dp_group
    head = TokenLogProbs(entropy=True, chunk_tokens=5)
    # Ranks that share a batch weight it alike, whatever the mode.
    shares_batch = engine.dp_size == 1 and engine.parallel_dims.world_size > 1
    for mode in ("token-mean",) if shares_batch else LOSS_AGGREGATIONS:
        given, _ = batches(mode, group=group)
        keep(mode, backward(given, loss_fn=with_entropy, head=head))
    given, _ = batches("token-mean", group=group)
    keep("logits", backward(given, loss_fn=with_entropy_of_logits))
    tempered = dataclasses.replace(head, temperature="temperature")
    keep("whole rows", backward(given, loss_fn=of_sequences, head=tempered, whole_rows=True))
    keep("sum", backward(given, head=TokenLogProbs(temperature=0.5)))
    for name, chunk in (("whole cross entropy", 0), ("chunked cross entropy", 5)):
        engine.job_config = copy.deepcopy(engine.job_config)
        engine.job_config.training.loss_chunk = chunk
        keep(name, backward(given))

    outputs = engine.forward_step(given, head=head)
    scores = {} if outputs is None else scores_from_sequences(dealt, outputs)

    given, share = batches("seq-mean-token-mean", normalize=False)
    backward(given, loss_fn=with_entropy, head=head)
    norm = engine.optim_step(denominator=share).grad_norm.item()
    return {"losses": losses, "gradients": gradients, "scores": scores, "deferred": norm}


def scores_from_sequences(dealt, outputs: list[TokenOutputs]) -> dict[int, torch.Tensor]:
    """Log-probs and entropies [2, T] of every sequence."""
    return {
        i: torch.stack([x[place] for x in of_batch])
        for rows, of_batch in zip(dealt, outputs, strict=True)
        for i, place in places(rows)
    }


def measure_all(cases: list, dump_folder: str) -> list[dict]:
    return [measure(layout, family, dump_folder) for layout, family in cases]


def largest_difference(gradients: dict, expected: dict) -> float:
    assert gradients.keys() == expected.keys()
    return max(
        ((gradients[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name in expected
    )


# ---- the tests ----


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    families = {family for cases in LAYOUTS.values() for _, family in cases}
    return {family: measure(Layout("1 process"), family, folder) for family in sorted(families)}


def test_head_gives_what_logits_give_and_deferring_the_denominator_changes_nothing(one_process):
    for run in one_process.values():
        gradients = run["gradients"]
        assert run["losses"]["logits"] == pytest.approx(run["losses"]["token-mean"], rel=1e-6)
        assert largest_difference(gradients["logits"], gradients["token-mean"]) < TOLERANCE
        whole, chunked = (f"{kind} cross entropy" for kind in ("whole", "chunked"))
        assert run["losses"][chunked] == pytest.approx(run["losses"][whole], rel=1e-6)
        assert largest_difference(gradients[chunked], gradients[whole]) < TOLERANCE
        norms = [g.double().norm() for g in gradients["seq-mean-token-mean"].values()]
        assert run["deferred"] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    "layouts", [2, *(pytest.param(x, marks=pytest.mark.slow) for x in ("2, more", 4))]
)
def test_layouts_and_splits_give_the_step_of_one_process(layouts, one_process, tmp_path):
    cases = LAYOUTS[layouts]
    world_size = 4 if layouts == 4 else 2
    ranks = run_ranks(measure_all, world_size, cases, str(tmp_path), timeout_seconds=400)
    for (layout, family), runs in zip(cases, zip(*ranks, strict=True), strict=True):
        expected = one_process[family]
        scores = {}
        for run in runs:
            losses = {name: expected["losses"][name] for name in run["losses"]}
            assert run["losses"] == pytest.approx(losses, rel=1e-5), layout.name
            assert run["deferred"] == pytest.approx(expected["deferred"], rel=1e-5), layout.name
            scores |= run["scores"]
        for mode in runs[0]["gradients"]:
            # Joined, because pipeline stages have different parameters.
            gradients = {n: g for run in runs for n, g in run["gradients"][mode].items()}
            difference = largest_difference(gradients, expected["gradients"][mode])
            assert difference < TOLERANCE, f"{layout.name}, {mode}: {difference:.1e}"
        assert scores.keys() == expected["scores"].keys(), layout.name
        for i, score in scores.items():
            torch.testing.assert_close(
                score, expected["scores"][i], rtol=0, atol=5e-6, msg=layout.name
            )
