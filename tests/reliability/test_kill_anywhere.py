"""A few trials of `kill_anywhere`; docs/measured.md says how many more were run."""

import pytest

from tests.reliability.kill_anywhere import VARIANTS, run_trials, summarize

NAMES = [
    "plain, async, 2 ranks",
    "RL, async, 1 rank",
    "data workers, sync, 1 rank",
    "validation, sync, 1 rank",
    "export, async, 1 rank",
    "RL, generating rank",
    "RL, training rank",
    "server, adapters",
]


@pytest.mark.parametrize("n_trials", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_run_killed_anywhere_resumes_from_its_newest_whole_step(n_trials, tmp_path):
    assert set(NAMES) <= set(VARIANTS)
    trials = run_trials(NAMES[:n_trials], n_trials, seed=1000, folder=tmp_path)
    assert not [trial for trial in trials if trial.failure], summarize(trials)
