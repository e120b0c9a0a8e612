"""Losses as weighted sums: equal for every split, and equal to what each mode's name says."""

import random

import pytest
import torch

from tests.unit.loss.loss_splits import (
    LOSSES,
    accumulated,
    aggregated_loss,
    all_ranks,
    largest_differences,
    random_split,
    random_step,
    random_theta,
    weights_of_step,
)
from torchtitan.loss.aggregation import (
    LOSS_AGGREGATIONS,
    aggregation_weights,
    weighted_cross_entropy,
    weighted_sum,
)

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([])]


def split_of(step, seed):
    return all_ranks(random_split(len(step), random.Random(seed)))


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", [[1 / 3, 1 / 3, 0], [0, 1 / 3], [0, 0], []]),
        ("token-sum", [[1, 1, 0], [0, 1], [0, 0], []]),
        ("seq-mean-token-sum", [[1 / 2, 1 / 2, 0], [0, 1 / 2], [0, 0], []]),
        ("seq-mean-token-mean", [[1 / 4, 1 / 4, 0], [0, 1 / 2], [0, 0], []]),
        ("seq-mean-token-sum-norm", [[1 / 20, 1 / 20, 0], [0, 1 / 20], [0, 0], []]),
        ("prompt-mean", [[1 / 3, 1 / 3, 0], [0, 1 / 3], [0, 0], []]),
    ],
)
def test_weights_by_hand(mode, expected):
    weights = aggregation_weights(MASKS, mode, norm=10, prompt_ids=["a", "a", "b", "c"])
    for got, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32))


# verl 0.9.1's agg_loss of eight sequences of four tokens, the sixth of which is masked whole:
# with the batch's global_batch_size of 8, and without; loss_scale_factor is 10.
VERL_LOSSES = (torch.arange(32.0) ** 2 / 16).view(8, 4)
VERL_MASK = torch.tensor(
    [[1.0, 0, 0, 0], [1] * 4, [1, 1, 0, 0], [1] * 4, [1] * 4, [0] * 4, [1] * 4]
)
VERL_MASK = torch.cat((VERL_MASK, torch.tensor([[0.0, 1, 1, 1]])))
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
    whole, ranks = found[0], 0.0
    parts = [
        aggregation_weights(masks, mode, norm=10, count_empty=True, normalize=False)
        for masks in (list(VERL_MASK[:5]), list(VERL_MASK[5:]))
    ]
    losses = VERL_LOSSES.split([5, 3])
    for (weights, _), of_part in zip(parts, losses, strict=True):
        ranks += float((torch.stack(weights) * of_part).sum())
    assert ranks / (sum(share for _, share in parts) or 1) == pytest.approx(whole, rel=1e-6)


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
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_the_same_for_every_split(loss, mode, dtype, tolerance):
    assert max(largest_differences(mode, dtype, 20, loss)) < tolerance


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_deferred_denominator_gives_the_same_gradient(mode):
    step, theta = random_step(torch.float64), random_theta(torch.float64)
    weights = weights_of_step(step, mode, dtype=torch.float64)
    expected = accumulated(step, weights, theta, split_of(step, 0))[1]
    gradient, denominator = torch.zeros_like(theta), 0.0
    for prompts in ((0, 3), (1,), (2, 4)):  # three calls, with whole prompts
        part = [sequence for sequence in step if sequence.prompt in prompts]
        weights, share = weights_of_step(part, mode, dtype=torch.float64, normalize=False)
        gradient += accumulated(part, weights, theta, split_of(part, 1))[1]
        denominator += share
    assert (denominator == 0) == (mode == "token-sum")
    torch.testing.assert_close(gradient / (denominator or 1), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_duplicating_the_step_doubles_a_sum_and_leaves_means(mode):
    step, theta = random_step(torch.float64), random_theta(torch.float64)
    twice = step + step
    prompts = [s.prompt for s in step] + [s.prompt + 5 for s in step]
    weights = aggregation_weights(
        [s.mask for s in twice], mode, norm=16.0, prompt_ids=prompts, dtype=torch.float64
    )
    loss, _ = accumulated(twice, weights, theta, split_of(twice, 0))
    factor = 2 if mode == "token-sum" else 1
    assert loss == pytest.approx(factor * aggregated_loss(step, mode, theta).item(), rel=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("masks", [[torch.zeros(3), torch.zeros(0)], []])
def test_step_without_a_token_in_the_loss_has_weights_zero(mode, masks):
    weights = aggregation_weights(masks, mode, norm=1.0, prompt_ids=[0] * len(masks))
    assert [w.tolist() for w in weights] == [[0.0] * len(mask) for mask in masks]


def test_what_a_mode_lacks_and_an_unknown_mode_are_refused():
    for mode, options, message in (
        *(
            ("seq-mean-token-sum-norm", {"norm": n}, "norm, which must be above 0")
            for n in (None, 0, -1)
        ),
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


def test_weighted_cross_entropy_needs_its_weights():
    with pytest.raises(ValueError, match=r"'loss_weights' \[B, T\] in the batch, got \['input'\]"):
        weighted_cross_entropy(torch.zeros(1, 2, 3), torch.zeros(1, 2), {"input": None})
