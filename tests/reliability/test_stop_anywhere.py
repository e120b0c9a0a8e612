"""Runs that are told to end, and ranks that are lost: a few instants; `stop_anywhere` tries many."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.reliability import jobs, stop_anywhere

TIMEOUT_SECONDS = 120
RL_JOB = jobs.flags_in("""
    job.config_file=torchtitan/rl/train_configs/copy_cpu.toml rl.num_prompts_per_step=2
    rl.eval_every=0 checkpoint.enable checkpoint.interval=1000
""")
LONG_JOB = [*stop_anywhere.JOB, "--training.steps=1000", "--checkpoint.interval=1000"]


def start_process(arguments, module="torchtitan.train"):
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=jobs.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_run_of_two_ranks_survives_an_instant_drawn_at_random(kind, tmp_path):
    assert stop_anywhere.run(kind, trials=1, ranks=2, seed=1, folder=tmp_path) == 0


@pytest.mark.slow
def test_ranks_of_torchrun_save_when_it_is_told_to_end_though_data_workers_hear_it_too(tmp_path):
    launcher = start_process(
        ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        + ["-m", "torchtitan.train", *LONG_JOB, f"--job.dump_folder={tmp_path}"]
        + ["--training.dataloader.num_workers=1"],
        "torch.distributed.run",
    )
    jobs.wait_until(lambda: len(stop_anywhere.losses(tmp_path)) >= 2, None, TIMEOUT_SECONDS)
    launcher.terminate()
    output, _ = launcher.communicate(timeout=TIMEOUT_SECONDS)
    assert stop_anywhere.whole_steps(tmp_path) == [max(stop_anywhere.losses(tmp_path))], output
    assert "its checkpoint is complete" in output and "error:" not in output


def test_training_goes_on_when_nobody_reads_its_output(tmp_path):
    process = start_process([*jobs.TINY_JOB, f"--job.dump_folder={tmp_path}"])
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(TIMEOUT_SECONDS) == 0


def last_step(output):
    return max(map(int, re.findall(r"step: +(\d+)/", output)), default=0)


KILLED = pytest.param(False, id="killed", marks=pytest.mark.slow)


@pytest.mark.parametrize("is_told_to_end", [KILLED, pytest.param(True, id="told to end")])
def test_rl_run_with_ranks_that_generate_saves_its_last_step(is_told_to_end, tmp_path):
    """Whether one of them is killed, or the whole job is told to end; and the run goes on.

    A rank that is killed takes episodes with it that were drawn ahead, and then no step is saved.
    """
    arguments = [*RL_JOB, f"--job.dump_folder={tmp_path}"] + jobs.flags_in(
        "metrics.log_freq=1 metrics.disable_color_printing rl.generator.ranks=2 "
        f"rl.async_steps={2 if is_told_to_end else 0}"
    )
    options = {"module": "torchtitan.rl.train", "ranks": 4}
    with jobs.start(arguments, tmp_path / "logs", **options) as job:
        jobs.wait_until(lambda: last_step(job.output()) >= 4, job, TIMEOUT_SECONDS)
        for rank in range(4) if is_told_to_end else [3]:
            job.send(signal.SIGTERM if is_told_to_end else signal.SIGKILL, rank=rank)
        outcome = job.wait(30)
        last = last_step(job.output())
        assert stop_anywhere.whole_steps(tmp_path) == [last], outcome.output
        if is_told_to_end:
            assert outcome.exit_codes == [0] * 4, outcome.output
        else:
            assert outcome.exit_codes == [1, 1, 1, -signal.SIGKILL], outcome.output
            for rank, output in enumerate(outcome.outputs[:3]):
                (line,) = [line for line in output.splitlines() if "error:" in line]
                assert f"rank {rank} ends because rank 3 ended without a message" in line
    with jobs.start(arguments, tmp_path / "logs", **options) as job:
        jobs.wait_until(lambda: last_step(job.output()) >= last + 4, job, TIMEOUT_SECONDS)
        assert f"training starts at step {last + 1}" in job.output()
