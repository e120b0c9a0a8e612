"""Tokens that the generator drew from another policy than the trainer's: weights, masks, the clip."""

import math

import pytest
import torch

from tests.unit.rl.test_losses import make_batch, value_and_gradient
from torchtitan.rl.losses import GRPOLoss

MISMATCH = [0.5, -1.0, 2.0, 0.1, -0.2, 0.05]  # log(old / generator); two sequences of three
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 1]])


def corrected(loss, old=True, moved=0.0):
    """Value and gradient with advantages 1 to 6, after the policy moved by these nats."""
    generator = [-2.0] * 6
    before = [g + m for g, m in zip(generator, MISMATCH, strict=True)]
    others = {"sequence_ids": SEQUENCES}
    if old:
        others["old_logprobs"] = torch.tensor([before], dtype=torch.float64)
    batch = make_batch(generator, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], **others)
    return value_and_gradient(loss, [b + moved for b in before], batch)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("token", [min(math.exp(m), 2.0) for m in MISMATCH]),
        ("sequence", [2.0] * 3 + [math.exp(-0.05)] * 3),  # exp(1.5) is above the cap
    ],
)
def test_weight_is_the_ratio_of_the_token_or_the_sequence_up_to_the_cap(correction, weights, old):
    _, gradient = corrected(GRPOLoss(correction=correction, correction_cap=2.0), old)
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, range(1, 7), strict=True)])


def test_ratio_is_relative_to_the_step_s_beginning_and_weights_stay():
    loss = GRPOLoss(correction="token", correction_cap=2.0, clip_eps=0.2)
    value, gradient = corrected(loss, moved=0.1)
    weights = [min(math.exp(m), 2.0) for m in MISMATCH]
    gains = [w * math.exp(0.1) * a for w, a in zip(weights, range(1, 7), strict=True)]
    assert value == pytest.approx(-sum(gains))
    assert gradient == pytest.approx([-gain for gain in gains])
    assert corrected(loss, moved=0.3)[1] == [0] * 6  # beyond the clip


def test_masks_leave_out_tokens_and_sequences_beyond_their_bounds():
    tokens = GRPOLoss(correction="token", correction_cap=100.0, max_token_mismatch=0.9)
    _, gradient = corrected(tokens)
    kept = [0, 3, 4, 5]
    expected = [-math.exp(MISMATCH[i]) * (i + 1) if i in kept else 0 for i in range(6)]
    assert gradient == pytest.approx(expected)
    # The means are 0.5 and -0.0167.
    _, gradient = corrected(GRPOLoss(correction="token", max_sequence_mismatch=0.4))
    assert gradient[:3] == [0, 0, 0] and all(gradient[3:])
    _, gradient = corrected(GRPOLoss(correction="token", max_sequence_mismatch=0.6))
    assert all(gradient)


def test_masked_tokens_are_in_no_term_of_the_loss():
    ref = torch.full((1, 6), -1.0, dtype=torch.float64)
    batch = make_batch([-2.0] * 6, [1.0] * 6, sequence_ids=SEQUENCES, ref_logprobs=ref)
    loss = GRPOLoss(max_token_mismatch=0.9, kl_coef=0.1, entropy_coef=0.1)
    logprobs = torch.tensor([[-2 + m for m in MISMATCH]], dtype=torch.float64, requires_grad=True)
    entropy = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(loss(logprobs, entropy, batch).loss, (logprobs, entropy))
    for gradient in found:
        assert (gradient[0] != 0).tolist() == [True, False, False, True, True, True]


def test_metrics_count_what_was_weighted_and_left_out():
    loss = GRPOLoss(
        correction="sequence", max_token_mismatch=0.9, max_sequence_mismatch=0.4, correction_cap=1.1
    )
    # Then a token of the first sequence that was not sampled, and padding.
    batch = make_batch([-2.0] * 8, [1.0] * 8)
    batch["sequence_ids"] = torch.tensor([[*SEQUENCES[0].tolist(), 0, -1]])
    batch["loss_mask"][0, 6:] = batch["loss_weights"][0, 6:] = 0
    metrics = loss(torch.tensor([[-2 + m for m in [*MISMATCH, 3.0, 0.0]]]), None, batch).metrics
    found = {name: value.item() for name, value in metrics.items()}
    assert found["mismatch_mean"] == pytest.approx(sum(map(abs, MISMATCH)))
    assert found["mismatch_max"] == pytest.approx(2.0)
    assert found["correction_mean"] == pytest.approx(3 * 1.1 + 3 * math.exp(-0.05))
    assert found["correction_truncated_frac"] == 3
    assert (found["truncated_sequences_count"], found["masked_sequences_count"]) == (1, 1)
    assert found["masked_frac"] == 3
