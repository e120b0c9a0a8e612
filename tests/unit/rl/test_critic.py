"""PPO with a critic: advantages of tokens, the value loss, and runs of the controller."""

import contextlib
import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rl.toy import rows_of, toy_config, toy_samples, weights_of
from torchtitan.rl.advantages import GAE
from torchtitan.rl.critic import Critic, ValueLoss
from torchtitan.rl.policy import PolicyTrainer

NUMBERS = st.floats(-3, 3)
GAE_RUN = ["--rl.advantage.name=gae", "--training.steps=8"]


# ---- advantages ----


@given(
    st.lists(st.tuples(NUMBERS, st.lists(NUMBERS, min_size=0, max_size=6)), max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_advantages_are_the_discounted_sums_of_the_definition(completions, gamma, lam):
    rewards = [reward for reward, _ in completions]
    values = [torch.tensor(of_one, dtype=torch.float64) for _, of_one in completions]
    advantages, returns = GAE(gamma, lam, whiten=False)(rewards, values)
    for reward, value, advantage, wanted in zip(rewards, values, advantages, returns, strict=True):
        n, v = len(value), [*value.tolist(), 0.0]
        assert advantage.shape == wanted.shape == (n,)
        for t in range(n):
            expected = sum(
                (gamma * lam) ** (k - t) * (reward * (k == n - 1) + gamma * v[k + 1] - v[k])
                for k in range(t, n)
            )
            assert advantage[t].item() == pytest.approx(expected, abs=1e-12)
            assert wanted[t].item() == pytest.approx(expected + v[t], abs=1e-12)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_tokens_in_any_order():
    rewards = [1.0, 0.0, 0.25]
    values = [torch.tensor(v) for v in ([0.3, 0.1, 0.9], [0.2], [-0.5, 0.4])]
    plain, returns = GAE(lam=0.5, whiten=False)(rewards, values)
    white, same_returns = GAE(lam=0.5)(rewards, values)
    expected = torch.cat(plain)
    expected = (expected - expected.mean()) / (expected.var(correction=0) ** 0.5)
    torch.testing.assert_close(torch.cat(white), expected)
    assert all(map(torch.equal, returns, same_returns))
    turned, _ = GAE(lam=0.5)(rewards[::-1], values[::-1])
    torch.testing.assert_close(torch.cat(turned[::-1]), expected)
    equal, _ = GAE()([1.0, 1.0], [torch.zeros(2), torch.zeros(3)])
    assert torch.cat(equal).tolist() == [0.0] * 5


# ---- the value loss ----


@pytest.mark.parametrize("value_clip", [0.2, 0.0])
def test_value_loss_and_its_gradient_are_those_worked_out_token_by_token(value_clip):
    rng = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(3, 7, generator=rng, dtype=torch.float64)

    values, old, returns, weights = draw().requires_grad_(), draw(), draw(), draw().abs()
    old = values.detach() + 0.4 * old  # some within the clip, some beyond
    weights[1, 2:] = 0
    batch = {"old_values": old, "returns": returns, "loss_weights": weights}
    batch["loss_mask"] = (weights > 0).double()
    output = ValueLoss(value_clip)(values, batch)
    output.loss.backward()

    total, n_clipped = 0.0, 0
    for i, j in ((i, j) for i in range(3) for j in range(7)):
        v, v_old, r, w = (t[i, j].item() for t in (values, old, returns, weights))
        loss, slope = (v - r) ** 2 / 2, v - r
        if value_clip:
            clipped = v_old + min(max(v - v_old, -value_clip), value_clip)
            if (clipped - r) ** 2 / 2 > loss:  # beyond the clip, or it were the same value
                loss, slope, n_clipped = (clipped - r) ** 2 / 2, 0.0, n_clipped + (w > 0)
        total += w * loss
        assert values.grad[i, j].item() == pytest.approx(w * slope, abs=1e-14)
    assert output.loss.item() == pytest.approx(total, rel=1e-13)
    assert output.metrics["value_clipped_frac"].item() == n_clipped
    assert (n_clipped > 0) == (value_clip > 0)


# ---- the critic ----


@contextlib.contextmanager
def critic_of(config):
    policy = PolicyTrainer(config)
    yield (critic := Critic(config, policy.engine))
    critic.close()
    policy.close()


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    with critic_of(toy_config(tmp_path_factory.mktemp("critic"), *GAE_RUN)) as critic:
        critic.begin()
        yield critic


def test_values_are_those_of_the_model_before_each_sampled_token(critic):
    samples, metrics = critic.with_advantages(toy_samples(9), [0.1 * i for i in range(9)])
    (model,) = critic.engine.model_parts
    values, returns = [], []
    for i, sample in enumerate(samples):
        with torch.no_grad():
            of_slots = model(sample.token_ids[None])[0, :, 0]
        is_sampled = sample.loss_mask != 0
        values.append(of_slots[is_sampled].double())
        returns.append(torch.full_like(values[-1], 0.1 * i))
        torch.testing.assert_close(sample.old_values[is_sampled].double(), values[-1])
        torch.testing.assert_close(sample.returns[is_sampled].double(), returns[-1])
        assert not sample.old_values[~is_sampled].any() and not sample.returns[~is_sampled].any()
    values, returns = torch.cat(values), torch.cat(returns)
    unexplained = (returns - values).var() / returns.var()
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained.item(), abs=1e-5)
    assert metrics["return_mean"] == pytest.approx(returns.mean().item())


def test_first_step_of_a_loaded_critic_has_the_rate_of_its_own_schedule(critic, tmp_path):
    config = toy_config(tmp_path, *GAE_RUN, "--lr_scheduler.warmup_steps=4")
    with critic_of(config) as other:
        other.load_state_dict(copy.deepcopy(critic.state_dict()))
        (group,) = other.engine.optimizers.param_groups
        assert group["lr"] == pytest.approx(config.optimizer.lr / 4)


# ---- runs ----


def test_old_values_and_advantages_are_of_the_critic_before_the_first_update(start):
    controller = start(*GAE_RUN, "--rl.epochs=2", "--rl.minibatches=2")
    update, seen = controller.critic.update, []

    def recorded(batch):
        (microbatch,), *_ = batch.microbatches
        values = controller.critic.forward(batch)
        change = [
            (values[index] - old)[old != 0].abs().max().item()
            for index, old in microbatch.per_sample(microbatch.inputs["old_values"]).items()
        ]
        seen.append((microbatch.inputs["old_values"], microbatch.inputs["advantages"], max(change)))
        return update(batch)

    controller.critic.update = recorded
    metrics = controller.train_step()
    for first, again in ((0, 2), (1, 3)):
        assert all(map(torch.equal, seen[first][:2], seen[again][:2]))
    changes = [change for *_, change in seen]
    assert changes[0] < 1e-5 < min(changes[1:])
    names = {"value_loss", "value_clipped_frac", "explained_variance", "grad_norm", "lr"}
    assert {f"critic/{name}" for name in names} <= metrics.keys()
    assert controller.step == 4


def test_critic_learns_alone_while_it_warms_up(tmp_path, start):
    flags = ["--rl.epochs=3", "--rl.critic.warmup_steps=4", "--rl.critic.lr=1e-2"]
    controller = start(*GAE_RUN, *flags, "--metrics.enable_jsonl")
    policy, critic = weights_of(controller.trainer), weights_of(controller.critic)
    first = controller.train_step()
    assert all(map(torch.equal, policy, weights_of(controller.trainer)))
    assert not any(map(torch.equal, critic, weights_of(controller.critic)))
    assert (controller.step, controller.trainer.policy_version) == (3, 0)
    assert "loss" not in first and first["critic/value_loss"] > 0
    assert first["critic/lr"] == pytest.approx(1e-2, rel=0.3)
    second = controller.train_step()
    assert (controller.step, controller.trainer.policy_version) == (6, 2)
    assert math.isfinite(second["loss"]) and second["lr"] < second["critic/lr"] / 5
    assert controller.train_step()["rl/lag"] == 0
    controller.close()
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [3, 6, 8]
