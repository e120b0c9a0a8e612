import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.rl.samples import make_episode, make_episodes
from tests.unit.rl.toy import rows_of, toy_config
from torchtitan.experiments.rl_toy.tasks import SumDigitsTask
from torchtitan.rl.metrics import append_episodes, staleness
from torchtitan.rl.rollout import Rollouts
from torchtitan.rl.tasks import Grade, Prompt
from torchtitan.rl.types import Completion, Episode

TASK = SumDigitsTask()
PROMPTS = [TASK.make_prompt("3+4=", "7"), TASK.make_prompt("9+9=", "18")]


def completion(text, stops=True):
    token_ids = tuple(TASK.tokenizer.encode(text, add_eos=stops))
    reason = "stop" if stops else "length"
    return Completion(token_ids, (-0.5,) * len(token_ids), reason, policy_version=2)


def graded_episodes():
    return make_episodes(TASK, PROMPTS, list(map(completion, ["7", "8", "18", "18"])))


def test_completions_are_graded_without_their_stop_token():
    episodes = graded_episodes()
    assert [e.text for e in episodes] == ["7", "8", "18", "18"]
    assert [e.reward for e in episodes] == [1, 0, 1, 1]
    assert [e.group_id for e in episodes] == [0, 0, 1, 1]
    # The policy also learns to stop: the stop token is one of the sampled tokens.
    assert episodes[0].token_ids[-1] == TASK.tokenizer.eos_id
    assert len(episodes[0].token_log_probs) == 2
    (cut,) = make_episodes(TASK, PROMPTS[:1], [completion("7", stops=False)])
    assert (cut.text, cut.reward, cut.finish_reason) == ("7", 1, "length")
    (stopped,) = make_episodes(TASK, PROMPTS[:1], [completion("7=+", stops=False)], ["+", "="])
    assert stopped.text == "7=+"  # it did not stop
    said = replace(completion("7=+", stops=False), finish_reason="stop")
    (stopped,) = make_episodes(TASK, PROMPTS[:1], [said], ["+", "="])
    assert (stopped.text, stopped.reward) == ("7", 1)


def test_lag_is_that_of_the_oldest_episode_and_its_mean_that_of_all():
    assert staleness([make_episode(policy_version=v) for v in (5, 3, 5, 5)], 6) == {
        "rl/lag": 3,
        "rl/lag_mean": 1.5,
        "rl/versions_per_episode": 1.0,
        "rl/episodes_by_lag/1": 3,
        "rl/episodes_by_lag/3": 1,
    }


def test_log_holds_the_first_episodes_of_each_step_and_is_continued(tmp_path):
    path = tmp_path / "logs" / "episodes.jsonl"
    episodes = graded_episodes()
    for step in (1, 2):
        append_episodes(str(path), step, episodes, limit=2)
    lines = rows_of(path)
    assert [line.pop("step") for line in lines] == [1, 1, 2, 2]
    assert [Episode.from_dict(line) for line in lines] == episodes[:2] * 2
    for limit, expected in ((-1, 4), (0, None)):
        path = tmp_path / f"{limit}.jsonl"
        append_episodes(str(path), 1, graded_episodes(), limit)
        assert (len(path.read_text().splitlines()) if path.exists() else None) == expected


def test_numbers_of_numpy_and_torch_are_plain_numbers_in_episodes(monkeypatch):
    grade = Grade(np.float32(1.5), {"length": torch.tensor(2), "exact": np.bool_(True)})
    prompt = Prompt("3+4=", np.array(PROMPTS[0].token_ids), "7")
    monkeypatch.setattr(TASK, "grade", lambda *_: grade)
    (episode,) = make_episodes(TASK, [prompt], [completion("7")])
    assert (episode.reward, episode.scores) == (1.5, {"length": 2, "exact": True})
    assert episode.prompt_token_ids == PROMPTS[0].token_ids
    assert Episode.from_dict(json.loads(json.dumps(episode.to_dict()))) == episode


@pytest.mark.parametrize(
    ("grades", "got"), [([1.0, 0.0], "got 2 of type float"), ([Grade(1.0)], "got 1 of type Grade")]
)
def test_grading_that_gives_no_grades_is_told(grades, got, monkeypatch):
    monkeypatch.setattr(TASK, "grade_episodes", lambda _: grades)
    words = f"a Grade for each of 2 completions, {got}; correct Sum"
    with pytest.raises(ValueError, match=words):
        make_episodes(TASK, PROMPTS, [completion("7"), completion("18")])


def test_task_without_held_out_prompts_cannot_be_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(TASK, "held_out", lambda _: [])
    words = "SumDigitsTask has no held-out prompt .* rl.eval_every to 0"
    with pytest.raises(ValueError, match=words):
        Rollouts(TASK, toy_config(tmp_path).rl, draws=None).of_held_out(greedy=True)
