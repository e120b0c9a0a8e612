"""A few trials of `kill_anywhere`; docs/measured.md says how many more were run."""

from tests.reliability.kill_anywhere import run_trials, summarize


def test_run_killed_anywhere_resumes_from_its_newest_whole_step(tmp_path):
    names = ["plain, async, 2 ranks", "RL, async, 1 rank"]
    trials = run_trials(names, 2, seed=1000, folder=tmp_path)
    assert not [trial for trial in trials if trial.failure], summarize(trials)
