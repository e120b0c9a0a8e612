"""What CI's workflows may do: a pull request's code must not reach our own machines unread."""

import subprocess
from pathlib import Path

import pytest
import yaml

from torchtitan.tools.torch_versions import TESTED

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = {
    # YAML reads the key `on` as True.
    path.stem: yaml.safe_load(path.read_text().replace("\non:", "\n'on':"))
    for path in sorted((ROOT / ".github/workflows").glob("*.yaml"))
}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_asks_for_few_permissions_and_has_limits(name):
    workflow = WORKFLOWS[name]
    assert "write" not in workflow["permissions"].values() or name == "gpu_label"
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        if "approval" in job.get("needs", ""):
            continue
        assert "self-hosted" not in job["runs-on"]


def test_own_machines_run_pull_requests_only_after_an_approval_of_each_run():
    workflow = WORKFLOWS["gpu_tests"]
    assert workflow["on"]["pull_request"] == {"types": ["labeled"]}  # not "synchronize"
    approval, *jobs = workflow["jobs"].values()
    assert "github.event.label.name == 'gpu'" in approval["if"]
    for job in jobs:
        assert "'gpu-pull-requests'" in job["environment"]
        checkout = job["steps"][0]["with"]
        assert checkout["persist-credentials"] is False
        assert "pull_request.head.sha" in checkout["ref"]  # what the reviewer has seen


def test_gpu_steps_need_a_gpu_and_go_on_after_a_failure():
    for job in ("one-gpu", "nccl"):
        steps = WORKFLOWS["gpu_tests"]["jobs"][job]["steps"]
        check = next(i for i, step in enumerate(steps) if "torch.cuda" in step.get("run", ""))
        assert steps[check + 1 :]
        for step in steps[check + 1 :]:
            assert "!cancelled()" in step["if"] and steps[check]["id"] in step["if"]


def test_fork_without_runners_waits_for_none():
    approval, one_gpu, nccl = WORKFLOWS["gpu_tests"]["jobs"].values()
    # A job is skipped together with the job that it needs.
    assert approval["if"].startswith("vars.GPU_RUNNERS == 'true' && (")
    assert one_gpu["needs"] == nccl["needs"] == "approval"
    assert nccl["if"] == "vars.MULTI_GPU_RUNNERS == 'true'"


def test_environment_outlives_the_checkout_and_is_not_shared_with_pull_requests():
    for job in ("one-gpu", "nccl"):
        folder = WORKFLOWS["gpu_tests"]["jobs"][job]["env"]["VENV"]
        assert folder.startswith("${{ github.workspace }}/../venv-")
        assert "github.event_name == 'pull_request' && 'pr-'" in folder
        uses = [step.get("run", "") for step in WORKFLOWS["gpu_tests"]["jobs"][job]["steps"]]
        assert not any(".venv" in use for use in uses)


@pytest.mark.parametrize(
    "smi, compiler, needed, complaint",
    [
        ("echo 580.65.06; echo 580.65.06", "cc", "2", None),
        ("echo 580.65.06", "cc", "2", "lacks GPUs: nvidia-smi shows 1 of 2"),
        ("exit 9", "cc", "1", "lacks GPUs: nvidia-smi shows 0 of 1"),
        ("echo 550.54.14", "cc", "1", "lacks a newer driver: it has 550.54.14"),
        ("echo 590.1", "no-such-compiler", "1", "lacks a C compiler, no-such-compiler"),
    ],
)
def test_runner_without_gpu_driver_or_compiler_is_told_before_anything_is_installed(
    tmp_path, smi, compiler, needed, complaint
):
    for name, script in (("nvidia-smi", smi), ("cc", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    # A Python of this machine may have no headers: one that says that it has.
    (tmp_path / "Python.h").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = "${{2#*include}}" ] || echo {tmp_path}\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CC": compiler, "PYTHON": str(python)}
    done = subprocess.run(
        [ROOT / ".ci/check_gpu_machine", needed], env=environment, capture_output=True, text=True
    )
    assert done.returncode == (complaint is not None), done.stderr
    assert complaint is None or complaint in done.stderr
    (tmp_path / "Python.h").unlink()
    done = subprocess.run(
        [ROOT / ".ci/check_gpu_machine", needed], env=environment, capture_output=True, text=True
    )
    assert "install python3-dev" in done.stderr


def test_workflow_that_may_write_runs_no_code_of_a_pull_request():
    workflow = WORKFLOWS["gpu_label"]
    assert set(workflow["on"]) == {"pull_request_target"}
    (job,) = workflow["jobs"].values()
    assert [list(step) for step in job["steps"]] == [["run", "env"]]
    assert "${{" not in job["steps"][0]["run"]


def test_every_tested_torch_and_the_nightly_build_have_their_runs():
    jobs = WORKFLOWS["cpu_tests"]["jobs"]
    pushed = [entry["torch"] for entry in jobs["test"]["strategy"]["matrix"]["include"]]
    nightly = jobs["other-versions"]["strategy"]["matrix"]["torch"]
    assert sorted({*pushed, *nightly}) == [*TESTED, "nightly"]
