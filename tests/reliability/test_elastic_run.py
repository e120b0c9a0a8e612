"""An elastic job whose pods die and come back has the losses of the unbroken run."""

import json
import signal
import time

import pytest

from tests.reliability import jobs
from tests.reliability.pods import Pods
from tests.unit.cluster.printed import documents
from torchtitan.cluster.engines import STOPPED

pytestmark = pytest.mark.slow
SECONDS = 240  # to wait for anything, on a busy machine
SETTINGS = """
[training]
dataset = "local"
global_batch_size = 6
[metrics]
enable_jsonl = true
[checkpoint]
enable = true
interval = 5
keep_latest_k = 3
"""
FLAGS = [*jobs.TINY_JOB, "--training.steps=5000", "--training.seq_len=256"]  # the last one counts


def started_pods(tmp_path, engine, nodes):
    """Start the pods of a printed job, as many as its manifest asks for."""
    config_file = tmp_path / "elastic.toml"
    config_file.write_text(SETTINGS)
    options = [f"--config={config_file}", f"--nodes={nodes}", "--gpus-per-node=0"]
    options += ["--image=titan", "--volume=shared"]
    config_map, jobset, *_ = documents(engine, *options, *FLAGS)
    spec = jobset["spec"]["template"]["spec"] if engine == "kubernetes" else jobset["spec"]
    pods = Pods(tmp_path, config_map, spec["replicatedJobs"][0])
    for index in range(spec["replicatedJobs"][0]["template"]["spec"]["completions"]):
        pods.start(index)
    return pods


def stop(pods):
    for process in pods.processes.values():
        process.send_signal(signal.SIGTERM)  # as the kubelet does when the machine is drained
    assert {process.wait(SECONDS) for process in pods.processes.values()} == {STOPPED}


def wait_for(is_true, pods):
    deadline = time.monotonic() + SECONDS
    while not is_true():
        logs = "\n".join(pods.log(index)[-3000:] for index in pods.processes)
        assert time.monotonic() < deadline and pods.are_running(), logs
        time.sleep(0.05)


def starts(folder):
    """Return the number of ranks of each attempt so far."""
    path = folder / "outputs/events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(x)["world_size"] for x in lines if '"kind": "start"' in x]


def newest_step(folder):
    return max((step for step, _ in jobs.logged_steps(folder / "outputs")), default=0)


def test_three_agents_then_two_then_three_have_the_losses_of_the_unbroken_run(tmp_path):
    pods = started_pods(tmp_path, "jobset", "2:3")

    def steps_on(n_ranks, n_steps):
        """Wait for an attempt on this many ranks and these steps of it; return the seconds to its first."""
        began = time.monotonic()
        wait_for(lambda: starts(pods.volume)[-1:] == [n_ranks], pods)
        before = newest_step(pods.volume)
        wait_for(lambda: newest_step(pods.volume) > before, pods)
        seconds = time.monotonic() - began
        wait_for(lambda: newest_step(pods.volume) > before + n_steps, pods)
        return seconds

    try:
        steps_on(3, 12)
        pods.kill(2)
        after_loss = steps_on(2, 12)
        pods.start(2)
        after_return = steps_on(3, 12)
        stop(pods)
    finally:
        pods.kill_all()
    assert starts(pods.volume) == [3, 2, 3]
    print(f"back after {after_loss:.0f} s without the pod, {after_return:.0f} s with it again")
    assert max(after_loss, after_return) < SECONDS

    last = newest_step(pods.volume)
    unbroken = tmp_path / "unbroken"
    files = [f"--job.config_file={tmp_path}/elastic.toml", f"--job.dump_folder={unbroken}"]
    with jobs.start([*files, *FLAGS], tmp_path / "one") as job:
        jobs.wait_until(lambda: len(jobs.logged_steps(unbroken)) > last, job, SECONDS)
    expected = dict(jobs.logged_steps(unbroken))
    found = jobs.logged_steps(pods.volume / "outputs")
    assert {step for step, _ in found} == set(range(1, last + 1))
    for step, (loss, norm) in found:
        # Another number of ranks sums in another order; fp32.
        assert loss == pytest.approx(expected[step][0], rel=2e-5), step
        assert norm == pytest.approx(expected[step][1], rel=1e-3), step


def test_two_pods_of_a_train_job_wait_for_the_one_that_leaves_and_end_with_codes(tmp_path):
    pods = started_pods(tmp_path, "kubernetes", 2)
    try:
        wait_for(lambda: newest_step(pods.volume) > 5, pods)
        leaves = pods.processes.pop(1)
        leaves.send_signal(signal.SIGTERM)
        assert leaves.wait(SECONDS) == STOPPED
        saved = newest_step(pods.volume)
        assert pods.are_running()
        pods.start(1)
        wait_for(lambda: newest_step(pods.volume) > saved + 5, pods)
        stop(pods)
    finally:
        pods.kill_all()
    steps = [step for step, _ in jobs.logged_steps(pods.volume / "outputs")]
    assert steps == list(range(1, len(steps) + 1))  # nothing was lost, and nothing repeated
    assert starts(pods.volume) == [2, 2]
