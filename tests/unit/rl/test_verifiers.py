import json
import time

import pytest

from tests.unit.rl.reward_functions import fancy
from tests.unit.rl.test_job_config import config_with
from torchtitan.config.checks import ConfigError
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.rollout import make_episodes
from torchtitan.rl.tasks import CharTokenizer, JsonlTask
from torchtitan.rl.types import Completion
from torchtitan.rl.verifiers import VerifierPool

NAME = "tests.unit.rl.reward_functions:fancy"
TOKENIZER = CharTokenizer("abcdehngiorstx=.")


@pytest.fixture(scope="module")
def pool():
    pool = VerifierPool(NAME, 2, timeout_seconds=1.0)
    yield pool
    pool.close()


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a=", "answer": "a", "scale": 2},
        {"prompt": "b=", "answer": "b", "scale": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_reward_function_sees_prompt_and_row(lines):
    task = JsonlTask(lines, fancy, TOKENIZER)
    prompts = task.held_out(2)
    assert [task.grade(prompt, "b").reward for prompt in prompts] == [0, 5]


def test_hanging_and_dying_verifiers_cost_their_limit_and_not_the_run(pool, lines, caplog):
    task = JsonlTask(lines, fancy, TOKENIZER, verifiers=pool)
    first, second = task.held_out(2)
    pool.call_all([(("a", "a"), {"prompt": "a=", "row": first.row})])  # processes start
    started = time.monotonic()
    grades = task.grade_all(
        [
            (first, "a"),
            (first, "hang"),
            (second, "b"),
            (second, "die"),
            (first, "exit"),
            (first, "x"),
        ]
    )
    assert time.monotonic() - started < 60  # two processes start again, which may be slow
    assert [grade.reward for grade in grades] == [2, 0, 5, 0, 0, 0]
    assert [grade.scores["verifier_failed"] for grade in grades] == [0, 1, 0, 1, 1, 0]
    assert "took longer than 1 s (rl.task.reward_timeout_seconds): reward 0" in caplog.text
    assert "process ended (exit code 3): reward 0" in caplog.text
    with pytest.raises(ValueError, match="KeyError: 'no such key'; .*correct the reward function"):
        task.grade_all([(first, "raise")])
    assert [grade.reward for grade in task.grade_all([(second, "b")] * 5)] == [5] * 5


def test_module_that_cannot_be_imported_is_named():
    pool = VerifierPool("tests.unit.rl.no_such_module:f", 1, 1.0)
    with pytest.raises(ValueError, match="cannot be started: ModuleNotFoundError"):
        pool.call_all([(("a", "a"), {})])


def test_graded_text_ends_before_the_stop_string(lines):
    task = JsonlTask(lines, fancy, TOKENIZER)
    drawn = tuple(TOKENIZER.encode("a.x"))
    completion = Completion(drawn, (-1.0,) * 3, "stop", 0)
    (episode,) = make_episodes(task, task.held_out(1), [completion], stop_strings=[".x"])
    assert (episode.text, episode.reward, episode.token_ids) == ("a", 2, drawn)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rl__task__reward_processes": -1}, "rl.task.reward_processes must be 0 to 1024"),
        ({"rl__task__reward_timeout_seconds": 0.0}, "rl.task.reward_timeout_seconds must be above"),
        ({"rl__sampling__stop_strings": [""]}, "rl.sampling.stop_strings must have characters"),
    ],
)
def test_settings_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        check_rl_config(config_with(**values))
