import dataclasses
import statistics

import pytest
import torch

from tests.unit.rl.toy import gradients, toy_config, toy_samples, weights_of
from torchtitan.config.checks import ConfigError
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.losses import CrossEntropyLoss
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import OptimParams


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    config = toy_config(tmp_path_factory.mktemp("run"), "--rl.loss.entropy_coef=0.01")
    yield (trainer := PolicyTrainer(config))
    trainer.close()


@pytest.fixture(autouse=True)
def no_gradients(trainer):
    yield
    trainer.zero_grad()


def batcher(**settings):
    return Batcher(**{"seq_len": 24, "rows": 4, "agg_mode": "token-sum"} | settings)


def test_deferred_normalisation_equals_weights_that_knew_the_whole_step(trainer):
    samples, no_update = toy_samples(9), OptimParams(lr=0.0, weight_decay=0.0)
    trainer.forward_backward(batcher(agg_mode="token-mean").batch(samples))
    expected = trainer.optim_step(no_update).grad_norm

    deferred = batcher(agg_mode="token-mean", deferred=True)
    for part in (samples[:3], samples[3:]):
        trainer.forward_backward(deferred.batch(part))
    with pytest.raises(ValueError, match="with and without Batcher.deferred"):
        trainer.forward_backward(batcher().batch(samples))
    assert trainer.optim_step(no_update).grad_norm == pytest.approx(expected, rel=1e-5)


def test_step_has_the_metrics_of_its_samples_and_the_statistics_of_their_advantages(trainer):
    samples = toy_samples(9)
    samples[4] = dataclasses.replace(samples[4], advantages=torch.zeros_like(samples[4].advantages))
    advantages = [s.advantages[s.loss_mask != 0].mean().item() for s in samples]
    make = batcher(rows=2, agg_mode="token-sum").batch
    whole = trainer.forward_backward(make(samples)).metrics
    assert whole["advantage_mean"] == pytest.approx(statistics.fmean(advantages))
    assert whole["advantage_std"] == pytest.approx(statistics.pstdev(advantages))
    trainer.zero_grad()
    losses = [trainer.forward_backward(make(part)).loss for part in (samples[:3], samples[3:])]
    # The largest difference is over all tokens, and the means are not those of the two parts.
    done = trainer.optim_step(OptimParams(lr=0.0))
    assert done.metrics == pytest.approx({"loss": sum(losses), **whole}, rel=1e-5)


def test_logprobs_come_back_per_sample_and_equal_those_of_a_forward(trainer):
    samples = toy_samples(6)
    batch = batcher(rows=2).batch(samples)
    found = trainer.forward_backward(batch, return_logprobs=True)
    forward = trainer.forward(batch)
    model = trainer.engine.model_parts[0]
    for sample, ours, again in zip(samples, found.logprobs, forward, strict=True):
        assert torch.equal(ours, again)
        with torch.no_grad():
            logits = model(sample.token_ids[None].to(trainer.engine.device)).cpu()
        expected = logits[0].log_softmax(-1).gather(1, sample.labels[:, None]).squeeze(1)
        torch.testing.assert_close(ours, expected * sample.loss_mask, rtol=1e-5, atol=2e-6)


def test_step_that_the_device_skips_makes_no_version(trainer, monkeypatch):
    monkeypatch.setattr(trainer.engine.update, "skips_on_device", True)
    before, version = weights_of(trainer), trainer.policy_version
    trainer.forward_backward(batcher().batch(toy_samples(3)))
    next(trainer.engine.model_parts[0].parameters()).grad.fill_(float("nan"))
    done = trainer.optim_step()
    assert (done.policy_version, done.skipped) == (version, True)
    assert all(a.equal(b) for a, b in zip(before, weights_of(trainer), strict=True))


def test_step_takes_the_callers_settings_once_and_zeroes(trainer):
    before, version = weights_of(trainer), trainer.policy_version
    groups = [g for optimizer in trainer.engine.optimizers for g in optimizer.param_groups]
    own = [(g["betas"], g["eps"], g["weight_decay"]) for g in groups]
    trainer.forward_backward(batcher().batch(toy_samples(3)))
    done = trainer.optim_step(OptimParams(lr=0.5, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0))
    assert (done.lr, done.policy_version, done.skipped) == (0.5, version + 1, False)
    grads = [p.grad for p in trainer.engine.model_parts[0].parameters()]
    assert all(grad is None or not grad.any() for grad in grads)
    # Without momentum Adam moves by lr * g / (|g| + eps): less than half the clipped gradient.
    moved = [(a - b).abs().max() for a, b in zip(before, weights_of(trainer), strict=True)]
    assert 0 < max(moved) < 0.5
    assert [(g["betas"], g["eps"], g["weight_decay"]) for g in groups] == own

    trainer.forward_backward(batcher().batch(toy_samples(3)))
    assert trainer.optim_step().lr == pytest.approx(trainer.job_config.optimizer.lr, rel=0.5)


@dataclasses.dataclass(frozen=True)
class FailsAtTheSecond(CrossEntropyLoss):
    seen: list = dataclasses.field(default_factory=list)

    def per_token(self, logprobs, batch):
        self.seen.append(1)
        if len(self.seen) == 3:  # the first call finds the names of the metrics
            raise RuntimeError("the second microbatch")
        return super().per_token(logprobs, batch)


def test_failed_call_leaves_no_gradients_and_no_share_of_the_denominator(trainer):
    batch = batcher(rows=2, agg_mode="token-mean", deferred=True).batch(toy_samples(9))
    trainer.zero_grad()
    trainer.forward_backward(batch)
    expected = gradients(trainer)
    with pytest.raises(RuntimeError, match="the second microbatch"):
        trainer.forward_backward(batch, FailsAtTheSecond())
    with pytest.raises(ValueError, match="found no gradients"):
        trainer.optim_step()
    trainer.forward_backward(batch)
    assert [x.denominator for x in trainer.passes] == [batch.denominator]
    torch.testing.assert_close(gradients(trainer), expected, rtol=0, atol=0)


def test_config_that_would_train_on_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rl.batch.packing needs positions"):
        PolicyTrainer(toy_config(tmp_path, "--rl.batch.packing"))
