import json

from tests.unit.rl.samples import make_episodes
from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.report import append_episodes
from torchtitan.rl.rollout import with_advantages
from torchtitan.rl.tasks import SumDigitsTask
from torchtitan.rl.types import Completion, Episode, TrainingSample

TASK = SumDigitsTask()
PROMPTS = [TASK.make_prompt("3+4=", "7"), TASK.make_prompt("9+9=", "18")]


def completion(text, stops=True):
    token_ids = tuple(TASK.tokenizer.encode(text, add_eos=stops))
    reason = "stop" if stops else "length"
    return Completion(token_ids, (-0.5,) * len(token_ids), reason, policy_version=2)


def graded_episodes():
    texts = ["7", "8", "18", "18"]
    return make_episodes(TASK, PROMPTS, [completion(text) for text in texts])


def test_completions_are_graded_without_their_stop_token():
    episodes = graded_episodes()
    assert [e.text for e in episodes] == ["7", "8", "18", "18"]
    assert [e.reward for e in episodes] == [1, 0, 1, 1]
    assert [e.group_id for e in episodes] == [0, 0, 1, 1]
    # The policy learns to stop, too: the token is in what was sampled.
    assert episodes[0].token_ids[-1] == TASK.tokenizer.eos_id
    assert len(episodes[0].token_log_probs) == 2
    (cut,) = make_episodes(TASK, PROMPTS[:1], [completion("7", stops=False)])
    assert (cut.text, cut.reward, cut.finish_reason) == ("7", 1, "length")


def test_advantages_are_within_prompts_and_make_training_samples():
    episodes = with_advantages(graded_episodes(), AdvantageEstimator())
    assert [e.advantage for e in episodes] == [0.5, -0.5, 0, 0]
    samples = [TrainingSample.of_episode(episode) for episode in episodes]
    assert [sample.policy_version for sample in samples] == [2] * 4
    assert samples[1].advantages.tolist() == [0, 0, 0, -0.5, -0.5]


def test_log_holds_the_first_episodes_of_each_step_and_is_continued(tmp_path):
    path = tmp_path / "logs" / "episodes.jsonl"
    episodes = graded_episodes()
    for step in (1, 2):
        append_episodes(str(path), step, episodes, limit=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [1, 1, 2, 2]
    assert [Episode.from_dict(line) for line in lines] == episodes[:2] * 2


def test_log_without_a_limit_holds_all_and_with_zero_makes_no_file(tmp_path):
    for limit, expected in ((-1, 4), (0, None)):
        path = tmp_path / f"{limit}.jsonl"
        append_episodes(str(path), 1, graded_episodes(), limit)
        assert (len(path.read_text().splitlines()) if path.exists() else None) == expected
