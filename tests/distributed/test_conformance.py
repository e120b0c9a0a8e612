"""The conformance kit passes, and reports a broken contract without stopping."""

import contextlib
import os
import time

import pytest

from torchtitan.distributed import utils as dist_utils
from torchtitan.engine import TrainingEngine
from torchtitan.testing import conformance
from torchtitan.testing.conformance_checks import CHECKS, Check
from torchtitan.testing.gloo import RankFailure, run_ranks
from torchtitan.tools import host


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_contract_holds(nproc):
    results = conformance.run_checks(nproc)
    failed = {r.name: r.problem for r in results if r.outcome == "FAIL"}
    assert not failed, "\n".join(failed.values())
    assert len(results) == len(CHECKS) < 100


def test_every_check_says_what_it_holds_and_where_it_comes_from():
    for check in CHECKS.values():
        assert check.row in {"1a", "1b", "1c", "1d", "1e", "3", "api"}, check.name
        assert len(check.holds) > 20, check.name


def test_failing_check_is_reported_and_ends_its_ranks_only(tmp_path):
    seconds, problems = {}, {}
    pending = ["config_model", "no such check", "config_compile"]
    conformance._run_until_failure(pending, 2, str(tmp_path), 60.0, seconds, problems)
    assert list(seconds) == ["config_model", "no such check"]
    assert "KeyError" in problems["no such check"]


def hang(kit):
    time.sleep(60)


def die(kit):
    os._exit(3)


def take_long(kit):
    time.sleep(1.5)


MISBEHAVING = {f"long {n}": take_long for n in range(3)} | {"hang": hang, "die": die}


def run_misbehaving(names, progress):
    for name, function in MISBEHAVING.items():
        CHECKS[name] = Check(name, "api", "", 1, function)
    conformance._run_on_rank(names, progress)  # of the rank: not patched


@pytest.mark.parametrize(
    "pending, timeout_seconds, problem",
    [
        (["long 0", "long 1", "long 2", "hang", "config_model"], 4.0, "did not end within 4 sec"),
        (["config_model", "die", "config_compile"], 60.0, "exit code 3"),
    ],
    ids=["hang", "death"],
)
def test_checks_have_their_own_time_and_those_that_passed_stay_passed(
    pending, timeout_seconds, problem, tmp_path, monkeypatch
):
    monkeypatch.setattr(conformance, "_run_on_rank", run_misbehaving)
    seconds, problems = {}, {}
    conformance._run_until_failure(pending, 1, str(tmp_path), timeout_seconds, seconds, problems)
    *passed, failed, _ = pending
    assert list(seconds) == [*passed, failed]
    assert list(problems) == [failed] and problem in problems[failed]


# What a check has to notice: (where, name of an attribute, what stands there instead).
BREAKAGES = {
    "guest_leaves_global_state": (host, "move_out", lambda engine: None),
    "offload_and_reload": (TrainingEngine, "to", lambda engine, *_, **__: None),
    "maybe_enable_amp_is_reusable": (
        dist_utils,
        "maybe_enable_amp",
        lambda *_: contextlib.nullcontext(),
    ),
}


def run_broken(check, progress):
    setattr(*BREAKAGES[check])
    # An engine that stays open, as after the checks before in a whole run.
    conformance._run_on_rank(["trainer_model_parts", check], progress)


@pytest.mark.parametrize("check", BREAKAGES)
def test_broken_contract_is_noticed(check, tmp_path):
    with pytest.raises(RankFailure, match=f"CheckFailed: .'{check}'"):
        run_ranks(run_broken, 1, check, tmp_path / "progress", init_process_group=False)


def test_table_names_results_and_counts(capsys):
    assert conformance.main(["--only", "config_model"]) == 0
    output = capsys.readouterr().out
    assert "pass  1b   config_model" in output
    assert "1 passed, 0 failed, 0 skipped, on 1 rank(s)" in output
    with pytest.raises(ValueError, match="is in no check's name"):
        conformance.run_checks(1, "no such check")


def test_failed_check_is_printed_with_its_problem_and_exit_code_1(monkeypatch, capsys):
    results = [
        conformance.Result("fine", "1a", "pass", 0.1, "what is fine"),
        conformance.Result(
            "broken", "1d", "FAIL", 0.2, "what should hold", "Traceback: 1 is not 2"
        ),
        conformance.Result("left out", "1d", "skip", 0.0, "pipelines", "needs 2 ranks"),
    ]
    monkeypatch.setattr(conformance, "run_checks", lambda nproc, only: results)
    assert conformance.main([]) == 1
    output = capsys.readouterr().out
    assert "FAIL  1d   broken" in output and "1 passed, 1 failed, 1 skipped" in output
    assert output.endswith("\nbroken: what should hold\nTraceback: 1 is not 2\n")
    monkeypatch.setattr(conformance, "run_checks", lambda nproc, only: [results[0], results[2]])
    assert conformance.main([]) == 0
