"""Episodes of several turns on 2 gloo ranks equal those of one process."""

import pytest

from tests.distributed.rl_runs import LAYOUTS, numbers, run_on_this_rank
from tests.distributed.test_rl_layouts import assert_first_steps_of_one_process
from tests.distributed.test_rl_roles import run_roles
from tests.unit.rl.test_dialogues import GUESS, STOPS
from tests.unit.rl.toy import rows_of
from torchtitan.experiments.rl_toy.tasks import GuessTask
from torchtitan.testing.gloo import run_ranks


def reply(task, prompt, turns):
    """A reply to any text of a random policy; half of the episodes end with each turn."""
    return "<>" if (len(turns[-1].text) + int(prompt.answer)) % 2 else None


def run_dialogues(folder, flags, kill_after=None):
    GuessTask.reply = reply  # in this process of a rank only
    return run_on_this_rank(folder, [*GUESS, *STOPS, *flags], kill_after)


def turns_of_episodes(folder):
    rows = rows_of(folder / "episodes.jsonl")
    return [(row["step"], row["turns"], row["token_ids"], row["reward"]) for row in rows]


STEPS = ["--training.steps=4", "--rl.eval_every=4", "--rl.eval_samples=5"]
STEPS += ["--rl.loss.entropy_coef=0.01", "--rl.log_samples=-1"]
SELECTION = ["--rl.redraws=2", "--rl.overlong_tokens=2", "--rl.loss.correction=token"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (run,) = run_ranks(run_dialogues, 1, folder, STEPS)
    return run, turns_of_episodes(folder)


@pytest.mark.parametrize(
    "layout",
    ["FSDP", "PP", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("TP", "CP"))],
)
def test_layouts_take_the_steps_of_one_process(layout, one_process, tmp_path):
    """Ranks that share a model draw together, however few of their dialogues go on."""
    expected, episodes = one_process
    assert {len(turns) for _, turns, _, _ in episodes} == {1, 3, 5}
    runs = run_ranks(run_dialogues, 2, tmp_path, [*STEPS, *LAYOUTS[layout]])
    assert_first_steps_of_one_process(runs, expected)
    assert turns_of_episodes(tmp_path) == episodes


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_that_only_generate_hold_the_same_dialogues(ahead, tmp_path):
    flags = [*STEPS, *SELECTION, *LAYOUTS["FSDP"], f"--rl.async_steps={ahead}"]
    flags += ["--rl.weight_sync.mode=broadcast"]
    both = run_roles(tmp_path / "both", 2, *flags, run=run_dialogues)
    flags += ["--rl.generator.ranks=2"]
    apart = run_roles(tmp_path / "apart", 4, *flags, run=run_dialogues)
    assert numbers(apart[0]) == numbers(apart[1]) == numbers(both[0])
    assert apart[0]["digest"] == both[0]["digest"]
    assert apart[0]["evaluations"] == both[0]["evaluations"] and both[0]["evaluations"]
    assert turns_of_episodes(tmp_path / "both") == turns_of_episodes(tmp_path / "apart")
    assert any(step["rl/turns"] > 1 for step in both[0]["steps"])
    assert any(step["rl/redraws"] > 0 for step in both[0]["steps"])
