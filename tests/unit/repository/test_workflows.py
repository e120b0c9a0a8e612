"""What CI's workflows may do: a pull request's code must not reach our own machines unread."""

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
