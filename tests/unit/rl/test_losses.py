import copy
import math
from dataclasses import dataclass

import pytest
import torch

from torchtitan.config import ConfigManager
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import (
    CISPOLoss,
    DAPOLoss,
    DROLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    LossWithTeacher,
    PolicyLoss,
    finalize_metrics,
    kl_divergence,
    loss_from_config,
    register_loss,
)

ALL_LOSSES = [GRPOLoss(), DAPOLoss(), GSPOLoss(), CISPOLoss(), ImportanceSamplingLoss(), DROLoss()]


def make_batch(generator_logprobs, advantages, **others):
    """One row that is one sequence, every token with weight 1."""
    generator_logprobs = torch.tensor([generator_logprobs], dtype=torch.float64)
    batch = {
        "generator_logprobs": generator_logprobs,
        "advantages": torch.tensor([advantages], dtype=torch.float64),
        "loss_mask": torch.ones_like(generator_logprobs),
        "loss_weights": torch.ones_like(generator_logprobs),
        "sequence_ids": torch.zeros(generator_logprobs.shape, dtype=torch.int64),
    }
    return batch | others


def value_and_gradient(loss, logprobs, batch, entropy=None):
    logprobs = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    output = loss(logprobs, entropy, batch)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output.loss.item(), gradient[0].tolist()


def of_ratios(loss, ratios, advantages):
    """Value and gradient where the policy's probability is `ratios` times the generator's."""
    generator = [-1.0] * len(ratios)
    logprobs = [-1.0 + math.log(ratio) for ratio in ratios]
    return value_and_gradient(loss, logprobs, make_batch(generator, advantages))


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: type(loss).__name__)
def test_on_policy_gradient_is_minus_the_advantage_whatever_its_sign(loss):
    # A "ratio" without the generator's log-probs was exp(mean log-prob) < 1, which is below the
    # clip for most tokens: samples of negative advantage then had no gradient at all.
    for advantage in (1.0, -1.0):
        _, gradient = value_and_gradient(loss, [-1.0] * 4, make_batch([-1.0] * 4, [advantage] * 4))
        assert gradient == pytest.approx([-advantage] * 4)


@pytest.mark.parametrize(
    ("loss", "tokens", "value"),
    [  # By hand: (ratio r, advantage A, gradient), of the gain min(r A, clip(r) A).
        (
            GRPOLoss(clip_eps=0.2),
            [(1.1, 2, -2.2), (1.5, 2, 0), (0.5, 2, -1), (1.5, -2, 3), (0.5, -2, 0), (0.9, -2, 1.8)],
            -(1.1 * 2 + 1.2 * 2 + 0.5 * 2 + 1.5 * -2 + 0.8 * -2 + 0.9 * -2),
        ),
        (
            DAPOLoss(ratio_clip_low=0.2, ratio_clip_high=0.28),
            [(1.25, 1, -1.25), (1.35, 1, 0), (0.75, -1, 0), (0.85, -1, 0.85)],
            -(1.25 + 1.28 - 0.8 - 0.85),
        ),
        (GRPOLoss(clip_eps=0.0), [(1, 2, -2), (1, -2, 2)], 0),  # on a bound of the clip
        # The dual clip at 3, which only negative advantages reach.
        (
            GRPOLoss(clip_eps=0.2),
            [(2.9, -2, 5.8), (3.1, -2, 0), (3.1, 2, 0), (3.1, 0, 0), (0.5, -2, 0)],
            2 * 2.9 + 2 * 3 - 2 * 1.2 + 2 * 0.8,
        ),
        # tinker-docs.thinkingmachines.ai/tinker/losses/dro, with log r of 0.5, -1.5 and 0.
        (
            DROLoss(beta=0.3),
            [(math.exp(0.5), 1, -0.85), (math.exp(-1.5), -2, 1.55), (1, 0.5, -0.5)],
            -((0.5 - 1) * 1 + (-1.5 - 1) * -2 + (0 - 1) * 0.5) + 0.15 * (0.5**2 + 1.5**2),
        ),
    ],
)
def test_token_has_the_loss_and_gradient_worked_out_by_hand(loss, tokens, value):
    ratios, advantages, expected = map(list, zip(*tokens, strict=True))
    found, gradient = of_ratios(loss, ratios, advantages)
    assert (found, gradient) == (pytest.approx(value), pytest.approx(expected))


def test_gspo_takes_the_geometric_mean_of_each_sequence_in_a_packed_row():
    # Two sequences of 2 and 3 tokens, a slot outside the loss, and padding.
    log_ratios = [0.0002, 0.0004, -0.02, 9.0, 0.01, 5.0]
    advantages = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    batch = make_batch([-1.0] * 6, advantages)
    batch["sequence_ids"] = torch.tensor([[0, 0, 1, 1, 1, -1]])
    batch["loss_mask"] = torch.tensor([[1.0, 1, 1, 0, 1, 0]], dtype=torch.float64)
    batch["loss_weights"] = batch["loss_mask"]
    loss = GSPOLoss(ratio_clip_low=0.1, ratio_clip_high=0.1)
    value, gradient = value_and_gradient(loss, [-1 + d for d in log_ratios], batch)
    first, second = math.exp(0.0003), math.exp(-0.005)
    assert value == pytest.approx(-2 * first - 2 * second)
    assert gradient == pytest.approx([-first, -first, -second, 0, -second, 0])


def test_cispo_clips_the_weight_of_a_token_and_keeps_its_gradient():
    loss = CISPOLoss(ratio_clip_low=1.0, ratio_clip_high=0.28)
    _, gradient = of_ratios(loss, [0.1, 1.0, 3.0], [1.0, -1.0, 2.0])
    assert gradient == pytest.approx([-0.1, 1.0, -2 * 1.28])


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: type(loss).__name__)
def test_far_off_policy_tokens_give_finite_losses_and_metrics(loss):
    batch = make_batch([-1000.0, 0.0], [-1.0, -1.0])
    value, gradient = value_and_gradient(loss, [0.0, -1000.0], batch)
    assert math.isfinite(value) and all(map(math.isfinite, gradient))
    output = loss(torch.tensor([[0.0, -1000.0]]), None, batch)
    assert all(value.isfinite() for value in output.metrics.values())
    assert output.metrics["logprob_diff_max"] == 1000


# ---- KL and entropy ----


def enumerated(kl_type):
    """Expected KL estimate over a vocabulary, its gradient, the exact KL and its gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    # Tokens are sampled: their probabilities are no part of the gradient.
    probabilities = logprobs.exp().detach()
    estimate = (probabilities * kl_divergence(logprobs, ref, kl_type, 10.0)).sum()
    gradients = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (estimate, exact)]
    return estimate, exact, *gradients


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kl_type):
    estimate, exact, _, _ = enumerated(kl_type)
    assert estimate.item() == pytest.approx(exact.item())


def test_gradient_of_k1_is_zero_on_average_and_of_k2_that_of_the_kl():
    _, _, gradient, _ = enumerated("k1")
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    _, _, gradient, expected = enumerated("k2")
    torch.testing.assert_close(gradient, expected)


def test_kl_and_entropy_terms_have_the_weights_of_the_policy_loss():
    weights = torch.tensor([[0.5, 0.0, 2.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.5, -1.0, -0.5]], dtype=torch.float64)
    batch = make_batch([-1.0] * 3, [0.0] * 3, loss_weights=weights, ref_logprobs=ref)
    entropy = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    loss = GRPOLoss(kl_coef=0.1, kl_type="k2", entropy_coef=0.01)
    value, _ = value_and_gradient(loss, [-1.0] * 3, batch, entropy)
    kl = 0.5 * 0.5**2 / 2 + 2 * 0.5**2 / 2
    assert value == pytest.approx(0.1 * kl - 0.01 * (0.5 * 1 + 2 * 3))


def test_missing_inputs_are_named():
    batch, logprobs = make_batch([-1.0], [1.0]), torch.tensor([[-1.0]])
    with pytest.raises(ValueError, match="kl_coef = 0.1 needs ref_logprobs"):
        GRPOLoss(kl_coef=0.1)(logprobs, None, batch)
    with pytest.raises(ValueError, match="entropy_coef = 0.1 needs the entropy"):
        GRPOLoss(entropy_coef=0.1)(logprobs, None, batch)


# ---- metrics ----


def test_metrics_are_sums_over_tokens_that_become_means():
    ratios = [1.5, 1.0, 0.5, 1.0]
    logprobs = torch.tensor([[math.log(ratio) for ratio in ratios]])
    batch = make_batch([0.0] * 4, [1.0, 1.0, 1.0, 9.0])
    batch["loss_mask"][0, 3] = batch["loss_weights"][0, 3] = 0
    output = GRPOLoss()(logprobs, None, batch)
    metrics = finalize_metrics({k: v.item() for k, v in output.metrics.items()}, 3)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["ratio_clipped_frac"] == pytest.approx(1 / 3)
    assert metrics["logprob_diff_mean"] == pytest.approx((math.log(1.5) + math.log(2)) / 3)
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(2))
    assert metrics["policy_loss"] == pytest.approx(output.loss.item())
    whole = {"policy_loss": 6.0, "mismatch_max": 6.0, "masked_sequences_count": 6.0}
    assert finalize_metrics(whole | {"kl_ref": 6.0}, 3) == whole | {"kl_ref": 2.0}
    # KL(generator || policy) by k3, r - 1 - log r.
    kl = [r - 1 - math.log(r) for r in ratios[:3]]
    assert metrics["kl_generator"] == pytest.approx(sum(kl) / 3)


# ---- registry ----


def test_own_loss_can_be_registered_once_and_its_settings_are_in_the_config():
    @dataclass(frozen=True)
    class Reinforce(PolicyLoss):
        scale: float = 1.0

        def per_token(self, logprobs, batch):
            return -self.scale * logprobs * batch["advantages"], {}

    register_loss("test_reinforce")(Reinforce)
    flags = ["--rl.loss.name=test_reinforce", "--rl.loss.args", "scale=2.5"]
    config = ConfigManager(JobConfig).parse_args(flags).rl.loss
    assert loss_from_config(config) == Reinforce(scale=2.5)
    config.args = {"kl_coef": 0.1}
    with pytest.raises(ValueError, match="no key of their own, got 'kl_coef'; set rl.loss.kl_coef"):
        loss_from_config(config)
    config.args = {"sclae": 1.0}
    with pytest.raises(ValueError, match="rl.loss.sclae = 1.0 is not read .* which reads .*scale"):
        loss_from_config(config)
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_loss("grpo")(Reinforce)


def test_copy_of_a_loss_with_a_teacher_has_the_attributes_of_its_policy_loss():
    loss = LossWithTeacher(GRPOLoss(dual_clip=4.0), 0.5, teacher=None)
    assert copy.deepcopy(loss).dual_clip == copy.copy(loss).dual_clip == 4.0
