"""The history of a run: `<dump_folder>/events.jsonl`."""

import json
import logging

import pytest
import torch

from tests.reliability import jobs
from tests.reliability.faults import SAVING
from torchtitan.config import JobConfig
from torchtitan.tools import events
from torchtitan.tools.logging import logger


def history(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / events.FILE_NAME).read_text().splitlines()]


def kinds(folder) -> list[str]:
    return [event["kind"] for event in history(folder) if event["kind"] != "warning"]


def run(tmp_path, *arguments, **options) -> jobs.Outcome:
    arguments = [*jobs.TINY_JOB, f"--job.dump_folder={tmp_path}/outputs", *arguments]
    return jobs.run(arguments, tmp_path / "logs", 60, **options)


@pytest.fixture
def config(tmp_path):
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    return config


def test_run_of_ranks_that_resumes_on_one_has_all_that_happened_on_one_record(tmp_path):
    validating = "enable dataset=c4_test freq=3 steps=1 seq_len=32".split()
    flags = [*SAVING, *(f"--validation.{setting}" for setting in validating)]
    assert run(tmp_path, *flags, ranks=2).exit_codes == [0, 0]
    first = ["start", "training", "validation", "save", "validation", "save", "end"]
    assert kinds(tmp_path / "outputs") == first
    resumed = run(tmp_path, *SAVING, "--training.steps=8", "--checkpoint.async_mode=async")
    assert resumed.exit_codes == [0], resumed.output
    later = ["start", "training", "save", "background save", "save", "end"]
    assert kinds(tmp_path / "outputs") == [*first, *later]

    events_of_run = history(tmp_path / "outputs")
    starts = [event for event in events_of_run if event["kind"] == "start"]
    assert starts[0]["versions"]["torch"] == torch.__version__
    assert [start["world_size"] for start in starts] == [2, 1]
    assert [start["config"]["training"]["steps"] for start in starts] == [4, 8]
    assert starts[0]["config_digest"] != starts[1]["config_digest"]
    steps = [event["step"] for event in events_of_run if event["kind"] in ("training", "save")]
    assert steps == [0, 2, 4, 4, 6, 8]
    saves = [event for event in events_of_run if event["kind"] == "save"]
    assert all(event["seconds"] > 0 for event in saves)
    # The last save is synchronous.
    assert [save["in_background"] for save in saves] == [False, False, True, False]


def test_fault_is_recorded_with_message_and_exit_code(tmp_path):
    outcome = run(tmp_path, "--training.nonfinite_grad_norm=stop", "--optimizer.lr=1e30")
    last = history(tmp_path / "outputs")[-1]
    assert outcome.exit_codes == [last["exit_code"]] == [1]
    assert last["kind"] == "fault"
    assert last["message"].splitlines()[0] in outcome.output


def test_fault_of_another_rank_is_recorded(tmp_path, config, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError), events.recording(config):
        logger.warning("not on record: rank 0 has the same")
        raise ValueError("damaged")
    (event,) = history(tmp_path)
    assert (event["kind"], event["rank"], event["message"]) == ("fault", 3, "damaged")


def test_line_that_was_cut_short_does_not_swallow_the_next(tmp_path, config):
    (tmp_path / events.FILE_NAME).write_text('{"kind": "sta')
    with events.recording(config):
        pass
    lines = (tmp_path / events.FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines[1:]] == ["start", "end"]


def test_warnings_and_marked_lines_are_events_and_others_are_not(tmp_path, config, caplog):
    caplog.set_level(logging.INFO, logger.name)
    with events.recording(config):
        logger.info("step 3")
        logger.warning("the data ended after %d steps", 3)
        logger.info("saved", extra=events.event("save", 3, seconds=0.5))
    logger.warning("after the run")
    warning, save = history(tmp_path)[1:-1]
    assert (warning["kind"], warning["message"]) == ("warning", "the data ended after 3 steps")
    assert (save["kind"], save["step"], save["seconds"]) == ("save", 3, 0.5)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(SystemExit(3), 3), (SystemExit("no"), 1), (SystemExit(), 0), (KeyboardInterrupt(), 130)],
)
def test_exits_are_faults_with_their_code(tmp_path, config, error, exit_code):
    with pytest.raises(type(error)), events.recording(config):
        raise error
    assert history(tmp_path)[-1]["exit_code"] == exit_code
