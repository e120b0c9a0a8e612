"""The script that trains twice and compares the losses."""

import json
import sys
from pathlib import Path

import pytest

from scripts import loss_compare
from scripts.loss_compare import ComparisonError, compare, main

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


def test_report_names_the_first_step_that_differs_and_by_how_much():
    report, is_equal = compare({1: 8.0, 2: 7.5, 3: 7.0}, {1: 8.0, 2: 7.25, 3: 7.5})
    assert not is_equal
    assert report.splitlines()[-1] == "2 of 3 losses differ, first at step 2, by 5.00e-01 at most"
    assert "     2     7.500000     7.250000   -2.50e-01" in report


def test_nan_and_missing_steps_are_not_equal():
    assert not compare({1: float("nan")}, {1: float("nan")})[1] and not compare({}, {})[1]
    report, is_equal = compare({1: 8.0, 2: 7.5}, {1: 8.0})
    assert not is_equal and "steps of only one of the two runs: 2" in report


@pytest.fixture
def trained(monkeypatch):
    """Replace training; returns the list of (ngpus, flags) of each run."""
    runs = []

    def train(scenario, flags, ngpus, log):
        runs.append((ngpus, flags))
        folder = Path(next(f for f in flags if "dump_folder" in f).partition("=")[2])
        folder.mkdir(exist_ok=True)
        records = [{"step": s, loss_compare.LOSS: 8 - s / 3 - scenario.ngpus} for s in (1, 2)]
        records.append({"step": 2, "validation_metrics/loss": 9.0})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))

    monkeypatch.setattr(loss_compare, "train", train)
    return runs


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["loss_compare", *arguments])
    main()


def test_both_runs_start_from_the_seed_checkpoint(trained, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [".", ".", "--baseline-ngpus=2", "--test-ngpus=4", f"--output-folder={out}"]
    with pytest.raises(SystemExit, match="the losses differ"):
        run_main(monkeypatch, *arguments, "--assert-equal")
    assert [ngpus for ngpus, _ in trained] == [1, 2, 4]
    assert "--checkpoint.create_seed_checkpoint" in trained[0][1]
    for _, flags in trained[1:]:
        assert f"--checkpoint.initial_load_path={out}/checkpoint/step-0" in flags
        assert "--debug.deterministic" in flags
    report = (out / "comparison_statistics.txt").read_text()
    assert report == capsys.readouterr().out
    assert "2 of 2 losses differ, first at step 1, by 2.00e+00 at most" in report


def test_training_that_fails_shows_the_end_of_its_log(tmp_path):
    scenario = loss_compare.Scenario(".", "nowhere.toml", "", "torchtitan.train", 1)
    with pytest.raises(ComparisonError, match="(?s)training failed.*names a TOML file that has to"):
        loss_compare.train(scenario, [], 1, tmp_path / "log")
