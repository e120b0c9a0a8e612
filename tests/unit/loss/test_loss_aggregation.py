"""Losses as weighted sums: equal for every split, and equal to what each mode's name says."""

import pytest
import torch

from tests.unit.loss.loss_splits import LOSSES, largest_differences
from torchtitan.loss.aggregation import LOSS_AGGREGATIONS, aggregation_weights, weighted_sum

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([])]


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


def test_prompts_without_a_token_count_if_asked():
    weights = aggregation_weights(
        MASKS, "prompt-mean", prompt_ids=["a", "a", "b", "c"], count_empty=True
    )
    found = torch.cat(weights).tolist()
    assert found == pytest.approx([1 / 9, 1 / 9, 0, 0, 1 / 9, 0, 0])  # prompts a, b and c


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_the_same_for_every_split(loss, mode, dtype, tolerance):
    assert max(largest_differences(mode, dtype, 20, loss)) < tolerance


def test_unknown_mode_and_missing_prompts_are_refused():
    with pytest.raises(ValueError, match="must be one of token-mean, .*, got 'mean'"):
        aggregation_weights(MASKS, "mean")
    with pytest.raises(ValueError, match="one for each of 4 sequences, got none"):
        aggregation_weights(MASKS, "prompt-mean")
    with pytest.raises(ValueError, match="one for each of 4 sequences, got 2"):
        aggregation_weights(MASKS, "prompt-mean", prompt_ids=[1, 2])


def test_values_without_weight_count_nowhere_even_if_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    loss = weighted_sum(values, torch.tensor([0.5, 0.0, 0.0]))
    loss.backward()
    assert loss == 0.5
    assert values.grad.tolist() == [0.5, 0, 0]
