import json
import re
import threading

import pytest
import torch

from tests.reliability.test_report import data_of
from tests.unit.rl.samples import make_episode
from tests.unit.rl.toy import rows_of, toy_config, toy_samples
from torchtitan.experiments.rl_toy.tasks import CopyTask
from torchtitan.report.page import page_of
from torchtitan.report.read import read_run
from torchtitan.rl.controller import Controller

pytestmark = pytest.mark.long


class GradesInParts(CopyTask):
    def grade(self, prompt, text):
        scores = {
            "total": super().grade(prompt, text).reward,
            "first": text[:1] == prompt.answer[0],
        }
        return {name: float(x) for name, x in scores.items() if name == "total" or text}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run with everything on."""
    folder = tmp_path_factory.mktemp("run")
    flags = ["--training.steps=4", "--metrics.enable_jsonl", "--metrics.enable_tensorboard"]
    flags += ["--rl.eval_every=2", "--rl.eval_samples=8", "--rl.generator.rescore"]
    controller = Controller(toy_config(folder, *flags), task=GradesInParts())
    controller.train()
    controller.close()
    controller.close()
    return folder


def test_rescored_logprobs_are_bitwise_those_of_the_trainer(finished):
    rows = [row for row in rows_of(finished / "metrics.jsonl") if "loss" in row]
    assert [row["loss/logprob_diff_max"] for row in rows] == [0.0] * 4


def test_episodes_are_written_with_what_led_to_their_advantage(finished):
    episodes = rows_of(finished / "episodes.jsonl")
    assert len(episodes) == 4 * 16
    groups: dict[tuple, list[dict]] = {}
    for episode in episodes:
        groups.setdefault((episode["step"], episode["group_id"]), []).append(episode)
    assert {len(group) for group in groups.values()} == {4}
    for group in groups.values():
        mean = sum(episode["reward"] for episode in group) / 4
        for episode in group:
            assert episode["advantage"] == pytest.approx(episode["reward"] - mean)


def test_scores_of_a_reward_are_averaged_over_the_episodes_that_have_them(finished):
    episodes = rows_of(finished / "episodes.jsonl")
    assert {"reward/first"} == {name for episode in episodes for name in episode["scores"]}
    metrics = rows_of(finished / "metrics.jsonl")
    for row in (row for row in metrics if "loss" in row):
        of_step = [e for e in episodes if e["step"] == row["step"]]
        scored = [e["scores"]["reward/first"] for e in of_step if e["text"]]
        assert row["rl/reward/first"] == pytest.approx(sum(scored) / len(scored))
    assert sum("eval/greedy_reward/first" in row for row in metrics) == 3
    (file,) = finished.rglob("events.out.tfevents.*")
    assert b"rl/reward/first" in file.read_bytes()
    html = page_of(read_run(finished))
    (panel,) = [p for p in data_of(html)["panels"] if p["title"] == "Reward"]
    labels = ["training", "held out, greedy", "held out, sampled", "first, training"]
    assert [curve["label"] for curve in panel["curves"]] == labels


def test_run_from_python_has_its_start_and_end_on_record(finished):
    kinds = [event["kind"] for event in rows_of(finished / "events.jsonl")]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("start") == 1
    assert re.search(r'class="state good">ended<', page_of(read_run(finished)))


def test_episodes_are_drawn_ahead_and_no_older_than_allowed(start):
    controller = start("--training.steps=5", "--rl.async_steps=2")
    lags = [controller.train_step()["rl/lag"] for _ in range(5)]
    assert lags == [0, 1, 2, 2, 2]

    old = make_episode(policy_version=2, reward=0.0)
    controller.rollouts.take = lambda step: [old]
    with pytest.raises(RuntimeError, match="3 weight updates old"):
        controller.train_step()


def test_step_and_its_update_wait_for_no_draw_that_is_going_on(start):
    """The third step's draw ends only after two steps are trained and their weights sent."""
    controller = start("--training.steps=6", "--rl.async_steps=2")
    may_draw, drawn_with = threading.Event(), []
    inner = controller.generator._generator
    generate = inner.generate

    def slow_generate(*arguments, **options):
        assert len(drawn_with) < 2 or may_draw.wait(timeout=60)
        drawn_with.append(inner.policy_version)
        return generate(*arguments, **options)

    inner.generate = slow_generate
    for _ in range(2):
        controller.train_step()
    assert controller.generator.policy_version == 2
    assert len(drawn_with) == 2
    may_draw.set()
    lags = [controller.train_step()["rl/lag"] for _ in range(4)]
    # Updates came meanwhile, and each draw used the version at the time of its request.
    assert lags == [2, 2, 2, 2] and drawn_with == [0, 0, 0, 1, 2, 3]


def test_pending_episodes_survive_a_checkpoint(start):
    controller = start("--rl.async_steps=2")
    controller.train_step()
    state = controller.state_dict()
    assert json.loads(state["state"])["rollouts"]["next_step"] == 4
    pending = [controller.rollouts.take(step) for step in (2, 3)]

    controller.load_state_dict(state)
    assert [controller.rollouts.take(step) for step in (2, 3)] == pending

    rollouts = {"next_step": 4, "pending": [[2, [{"prompt": 1}]]]}
    damaged = json.dumps({"task": {"num_drawn": 1}, "rollouts": rollouts})
    for text in ("", "{", "[]", "{}", "[" * 100_000, '{"task": 3, "rollouts": {}}', damaged):
        with pytest.raises(ValueError, match="state of the RL run .* cannot be read"):
            controller.load_state_dict({"state": text})


def test_reference_is_the_policy_that_training_began_with(start):
    controller = start("--rl.loss.kl_coef=0.1", "--optimizer.lr=1e-2")
    samples = toy_samples(3)
    batch = controller.batcher.batch(samples)
    before = controller.trainer.forward(batch)

    kl = [controller.train_step()["loss/kl_ref"] for _ in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and kl[2] > 1e-4
    assert not torch.equal(controller.trainer.forward(batch)[0], before[0])
    for found, expected in zip(controller.reference.logprobs(batch), before, strict=True):
        assert torch.equal(found, expected)


def test_resuming_another_task_is_refused_unless_allowed(tmp_path, caplog, capsys, start):
    flags = ["--checkpoint.enable", "--checkpoint.no_last_save_model_only"]
    controller = Controller(toy_config(tmp_path, *flags, "--training.steps=1"))
    controller.train()
    controller.close()
    flags += ["--rl.task.name=sort", "--training.steps=2", "--rl.loss.name=dapo"]
    resumed = Controller(toy_config(tmp_path, *flags))
    task = r"rl.task.name was 'copy \(CopyTask\)' when it was saved and is 'sort \(SortTask\)' now. The"
    with pytest.raises(ValueError, match=task):
        resumed.setup()
    resumed.close()
    allowed = "--checkpoint.allow_changed=rl.task.name"
    resumed = start(*flags, allowed)
    told = caplog.text + capsys.readouterr().out  # a process without handlers prints
    assert "rl.loss.name was 'grpo' when it was saved and is 'dapo' now: this run's" in told
