"""Several optimizer updates on one batch of episodes."""

import pytest
import torch

from tests.unit.rl.toy import rows_of, toy_config, weights_of
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.rollout import with_advantages
from torchtitan.rl.types import TrainingSample

TWICE_TWO = ["--rl.epochs=2", "--rl.minibatches=2"]


def test_updates_are_those_of_a_loop_around_the_trainer(tmp_path, start):
    controller = start(*TWICE_TWO, "--training.steps=4", folder=tmp_path / "a")
    controller.rollouts.start_until(1)
    episodes = controller.rollouts.take(1)
    controller.rollouts.take = lambda number: episodes
    metrics = controller.train_step()

    by_hand = PolicyTrainer(toy_config(tmp_path / "b", "--training.steps=4"))
    episodes = with_advantages(episodes, controller.advantages)
    samples = [TrainingSample.from_episode(episode) for episode in episodes]
    norms, ratios = [], []
    for _ in range(2):
        for part in (samples[:8], samples[8:]):  # two of four prompts each
            output = by_hand.forward_backward(controller.batcher.batch(part))
            norms.append(by_hand.optim_step().grad_norm)
            ratios.append(output.metrics["ratio_mean"])
    assert all(map(torch.equal, weights_of(controller.trainer), weights_of(by_hand)))
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 4)
    assert metrics["loss/ratio_mean"] == pytest.approx(sum(ratios) / 4)
    assert ratios[0] == pytest.approx(1, abs=1e-5) != pytest.approx(ratios[2], abs=1e-5)
    assert (controller.step, controller.num_batches, metrics["rl/policy_version"]) == (4, 1, 4)
    by_hand.close()


def test_lag_counts_updates_and_is_bounded_by_batches_ahead(start):
    controller = start(*TWICE_TWO, "--training.steps=18", "--rl.async_steps=2")
    lags = [controller.train_step()["rl/lag"] for _ in range(5)]
    assert lags == [0, 4, 8, 8, 8]
    # The last batch makes only as many updates as steps are left.
    assert (controller.step, controller.num_batches) == (18, 5)


def test_correction_is_relative_to_the_policy_before_the_first_update(start):
    controller = start(*TWICE_TWO, "--rl.loss.correction=token", "--optimizer.lr=1e-2")
    seen = []
    forward_backward = controller.trainer.forward_backward

    def recorded(batch):
        (microbatch,), *_ = batch.microbatches
        seen.append((microbatch.inputs["old_logprobs"], microbatch.inputs["generator_logprobs"]))
        output = forward_backward(batch)
        seen[-1] += (output.metrics,)
        return output

    controller.trainer.forward_backward = recorded
    controller.train_step()
    for first, second in ((0, 2), (1, 3)):
        assert torch.equal(seen[first][0], seen[second][0])
        assert seen[first][2]["mismatch_max"] == seen[second][2]["mismatch_max"]
    for old, generator, metrics in seen:
        # The generator has the trainer's weights: decoding with a cache rounds differently.
        torch.testing.assert_close(old, generator, rtol=0, atol=2e-5)
        assert metrics["mismatch_max"] < 2e-5
    assert abs(seen[3][2]["ratio_mean"] - 1) > 1e-4


def test_evaluations_and_checkpoints_are_due_where_a_multiple_is_passed(tmp_path, start):
    overrides = ["--training.steps=12", "--rl.eval_every=6", "--rl.eval_samples=2"]
    overrides += ["--checkpoint.enable", "--checkpoint.interval=6", "--metrics.enable_jsonl"]
    overrides += ["--metrics.log_freq=5", "--checkpoint.keep_latest_k=0"]
    start(*TWICE_TWO, *overrides).train()
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/greedy_reward" in row] == [0, 8, 12]
    assert [row["step"] for row in rows if "loss" in row] == [4, 8, 12]
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} >= {"step-8", "step-12"}
