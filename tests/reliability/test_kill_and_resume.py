"""A run that is killed and started again continues as if nothing had happened, bit for bit."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.reliability import jobs

STEPS = 20
OVERRIDES = [
    "--model.name=llama3",
    "--model.flavor=debugmodel",
    "--training.dataset=python_docs",
    f"--training.steps={STEPS}",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
    "--lr_scheduler.warmup_steps=5",
    "--debug.seed=3",
    "--metrics.log_freq=1",
    "--metrics.enable_jsonl",
    "--checkpoint.enable",
    "--checkpoint.interval=10",
    "--checkpoint.no_last_save_model_only",
]
TIMEOUT_SECONDS = 120


def start(dump_folder: Path, extra: list[str]) -> jobs.Job:
    return jobs.start(
        [*OVERRIDES, f"--job.dump_folder={dump_folder}", *extra], dump_folder / "output"
    )


def run_to_the_end(dump_folder: Path, extra: list[str]) -> None:
    outcome = start(dump_folder, extra).wait(TIMEOUT_SECONDS)
    assert outcome.exit_codes == [0], outcome.output


def logged_steps(dump_folder: Path) -> list[dict]:
    path = dump_folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline isn't whole yet
    return [json.loads(line) for line in lines]


def losses(dump_folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step; of a repeated step, the last."""
    return {
        row["step"]: (row["loss_metrics/global_avg_loss"], row["grad_norm"])
        for row in logged_steps(dump_folder)
    }


def is_whole(step_folder: Path) -> bool:
    return (step_folder / ".metadata").exists() and not (step_folder / ".incomplete").exists()


def kill_after_step(dump_folder: Path, extra: list[str], step: int) -> None:
    job = start(dump_folder, extra)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and job.is_running():
        if is_whole(dump_folder / "checkpoint" / "step-10") and any(
            row["step"] >= step for row in logged_steps(dump_folder)
        ):
            job.send(signal.SIGKILL)
            break
        time.sleep(0.01)
    outcome = job.wait(TIMEOUT_SECONDS)
    assert outcome.exit_codes == [-signal.SIGKILL], "the run ended before it could be killed"


@pytest.mark.slow  # kill_anywhere has all three in CI
@pytest.mark.parametrize(
    "extra",
    [[], ["--checkpoint.async_mode=async"], ["--training.dataloader.num_workers=2"]],
    ids=["sync", "async", "two data workers"],
)
def test_killed_run_resumes_with_bitwise_equal_losses(extra, tmp_path):
    run_to_the_end(tmp_path / "unbroken", extra)
    kill_after_step(tmp_path / "killed", extra, step=12)
    before = losses(tmp_path / "killed")
    assert max(before) < STEPS
    run_to_the_end(tmp_path / "killed", extra)

    resumed = losses(tmp_path / "killed")
    first_after = [row["step"] for row in logged_steps(tmp_path / "killed")][len(before)]
    assert first_after == 11, "resumed from the checkpoint of step 10"
    assert resumed == losses(tmp_path / "unbroken")
