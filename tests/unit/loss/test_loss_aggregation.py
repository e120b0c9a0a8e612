"""Losses as weighted sums: equal for every split, and equal to what each mode's name says."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.aggregation import (
    LOSS_AGGREGATIONS,
    aggregation_weights,
    weighted_cross_entropy,
    weighted_sum,
)
from torchtitan.loss.logprobs import TokenOutputs

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([])]
NORM = 16.0


class Sequence(NamedTuple):
    losses: Tensor  # [T]
    mask: Tensor
    prompt: int


def random_step(dtype: torch.dtype) -> list[Sequence]:
    """12 sequences of 0 to 20 tokens for 5 prompts; two are fully masked and one is empty."""
    generator = torch.Generator().manual_seed(0)
    step = []
    for i in range(12):
        length = 0 if i == 3 else int(torch.randint(1, 21, (), generator=generator))
        mask = torch.rand(length, generator=generator) < (0.0 if i in (5, 8) else 0.7)
        losses = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
        step.append(Sequence(losses.requires_grad_(), mask, prompt=i % 5))
    return step


def weights_of(step: list[Sequence], mode: str, **options):
    masks, prompts = [x.mask for x in step], [x.prompt for x in step]
    return aggregation_weights(masks, mode, norm=NORM, prompt_ids=prompts, **options)


def loss_of_split(step: list[Sequence], weights: list[Tensor], seed: int) -> Tensor:
    """Return the loss, summed over microbatches of padded rows of sequences; some rows are empty."""
    split = random.Random(seed)
    rows: list[list[int]] = [[] for _ in range(split.randint(1, 12))]
    for i in split.sample(range(len(step)), len(step)):
        split.choice(rows).append(i)

    def padded(tensors: list[Tensor], some: list[list[int]], value: float) -> Tensor:
        joined = [torch.cat([tensors[0][:0], *(tensors[i] for i in row)]) for row in some]
        return pad_sequence(joined, batch_first=True, padding_value=value)

    losses, total = [x.losses for x in step], torch.zeros(())
    while rows:
        n = split.randint(1, len(rows))
        some, rows = rows[:n], rows[n:]
        total = total + weighted_sum(padded(losses, some, 7.0), padded(weights, some, 0.0))
    return total


def by_definition(step: list[Sequence], mode: str) -> Tensor:
    sums = [x.losses[x.mask].sum() for x in step]
    counts = [int(x.mask.sum()) for x in step]
    counted = [i for i, n in enumerate(counts) if n]
    if mode == "prompt-mean":
        prompts = {step[i].prompt for i in counted}
        members = [[i for i in counted if step[i].prompt == prompt] for prompt in prompts]
        means = [sum(sums[i] for i in own) / sum(counts[i] for i in own) for own in members]
        return sum(means) / len(means)
    return {
        "token-sum": sum(sums),
        "token-mean": sum(sums) / sum(counts),
        "seq-mean-token-sum": sum(sums) / len(counted),
        "seq-mean-token-sum-norm": sum(sums) / NORM / len(counted),
        "seq-mean-token-mean": sum(sums[i] / counts[i] for i in counted) / len(counted),
    }[mode]


def gradients(loss: Tensor, step: list[Sequence]) -> Tensor:
    grads = torch.autograd.grad(loss, [x.losses for x in step], materialize_grads=True)
    return torch.cat(grads).double()


# verl 0.9.1's agg_loss of eight sequences of four tokens, the sixth of which is masked whole:
# with the batch's global_batch_size of 8, and without; loss_scale_factor is 10.
VERL_LOSSES = (torch.arange(32.0) ** 2 / 16).view(8, 4)
VERL_MASK = torch.ones(8, 4)
VERL_MASK[0, 1:] = VERL_MASK[2, 2:] = VERL_MASK[5] = VERL_MASK[7, 0] = 0
VERL_AGG_LOSS = {
    "token-mean": (21.428977966308594, 21.428977966308594),
    "token-sum": (471.4375, 471.4375),
    "seq-mean-token-sum": (58.9296875, 67.34821319580078),
    "seq-mean-token-mean": (16.77474021911621, 19.171131134033203),
    "seq-mean-token-sum-norm": (5.892968654632568, 6.734821319580078),
}


@pytest.mark.parametrize("mode", VERL_AGG_LOSS)
def test_sequences_without_a_token_count_in_verls_denominator_if_asked(mode):
    found = []
    for count_empty in (True, False):
        weights = aggregation_weights(list(VERL_MASK), mode, norm=10, count_empty=count_empty)
        found.append(float((torch.stack(weights) * VERL_LOSSES).sum()))
    assert found == pytest.approx(VERL_AGG_LOSS[mode], rel=1e-6)
    loss = total = 0.0
    options = dict(norm=10, count_empty=True, normalize=False)
    for masks, losses in zip(VERL_MASK.split([5, 3]), VERL_LOSSES.split([5, 3]), strict=True):
        weights, share = aggregation_weights(list(masks), mode, **options)
        loss += float((torch.stack(weights) * losses).sum())
        total += share
    assert loss / (total or 1) == pytest.approx(found[0], rel=1e-6)


def test_prompts_weigh_alike_however_many_tokens_answer_them():
    def weights(ids, **options):
        found = aggregation_weights(MASKS, "prompt-mean", prompt_ids=ids, **options)
        return [w.tolist() for w in found]

    expected = [[0.25, 0.25, 0], [0, 0.5], [0, 0], []]
    ids = torch.tensor([7, 8, 8, 9])
    assert weights([7, 8, 8, 9]) == weights(ids) == weights(list(ids)) == expected
    # Prompts without a token count if asked: a, b and c.
    found = sum(weights(["a", "a", "b", "c"], count_empty=True), [])
    assert found == pytest.approx([1 / 9, 1 / 9, 0, 0, 1 / 9, 0, 0])


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_the_same_for_every_split(mode, dtype, tolerance):
    exact, step = random_step(torch.float64), random_step(dtype)
    expected = by_definition(exact, mode)
    gradient, weights = gradients(expected, exact), weights_of(step, mode, dtype=dtype)
    for seed in range(20):
        loss = loss_of_split(step, weights, seed)
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        torch.testing.assert_close(gradients(loss, step), gradient, rtol=tolerance, atol=0)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_deferred_denominator_gives_the_same_loss(mode):
    step, loss, denominator = random_step(torch.float64), 0.0, 0.0
    for prompts in ((0, 3), (1,), (2, 4)):  # three calls, with whole prompts
        part = [sequence for sequence in step if sequence.prompt in prompts]
        weights, share = weights_of(part, mode, dtype=torch.float64, normalize=False)
        loss, denominator = loss + loss_of_split(part, weights, 1), denominator + share
    assert (denominator == 0) == (mode == "token-sum")
    torch.testing.assert_close(loss / (denominator or 1), by_definition(step, mode))


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("masks", [[torch.zeros(3), torch.zeros(0)], []])
def test_step_without_a_token_in_the_loss_has_weights_zero(mode, masks):
    weights = aggregation_weights(masks, mode, norm=1.0, prompt_ids=[0] * len(masks))
    assert [w.tolist() for w in weights] == [[0.0] * len(mask) for mask in masks]


def test_what_a_mode_lacks_and_an_unknown_mode_are_refused():
    for mode, options, message in (
        ("seq-mean-token-sum-norm", {}, "norm, which must be above 0"),
        ("seq-mean-token-sum-norm", {"norm": 0}, "norm, which must be above 0"),
        ("mean", {}, "must be one of token-mean, .*, got 'mean'"),
        ("prompt-mean", {}, "one for each of 4 sequences, got none"),
        ("prompt-mean", {"prompt_ids": [1, 2]}, "one for each of 4 sequences, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            aggregation_weights(MASKS, mode, **options)


def test_values_without_weight_count_nowhere_even_if_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    loss = weighted_sum(values, torch.tensor([0.5, 0.0, 0.0]))
    loss.backward()
    assert loss == 0.5
    assert values.grad.tolist() == [0.5, 0, 0]


def test_weighted_cross_entropy_is_that_of_logits_and_of_log_probs():
    logits, weights = torch.randn(2, 5, 7, dtype=torch.float64), torch.rand(2, 5)
    labels = torch.randint(0, 7, (2, 5))
    labels[:, 1] = IGNORE_INDEX
    losses = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE_INDEX, reduction="none")
    for pred in (logits, TokenOutputs(-losses, None)):
        found = weighted_cross_entropy(pred, labels, {"loss_weights": weights})
        torch.testing.assert_close(found, (losses * weights).sum())


def test_weighted_cross_entropy_needs_its_weights():
    with pytest.raises(ValueError, match=r"'loss_weights' \[B, T\] in the batch, got \['input'\]"):
        weighted_cross_entropy(torch.zeros(1, 2, 3), torch.zeros(1, 2), {"input": None})
