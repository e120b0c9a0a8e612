"""Signals and lost ranks at random instants of small runs: `python -m tests.reliability.stop_anywhere`.

Three kinds of trial:

- stop: SIGTERM to one rank; all ranks save and exit with 0, and the run goes on to the losses of an
  unbroken one.
- kill: SIGKILL to one rank; the others are gone within 30 s, and the first message is about it.
- restart: SIGKILL to one rank under `torchrun --max-restarts 1`; the run ends with the losses of an
  unbroken one.

Prints a line per trial, and ends with exit code 1 if one fails.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs

STEPS = 12
LIMIT_SECONDS = 30
START_SECONDS = 120
JOB = jobs.TINY_JOB + jobs.flags_in(f"""
    training.steps={STEPS} metrics.enable_jsonl checkpoint.enable checkpoint.interval=5
    checkpoint.no_last_save_model_only
""")


def losses(dump_folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step; of a repeated step, the last."""
    return dict(jobs.logged_steps(dump_folder))


def whole_steps(dump_folder: Path) -> list[int]:
    folders = (dump_folder / "checkpoint").glob("step-*")
    return sorted(
        int(folder.name.removeprefix("step-"))
        for folder in folders
        if (folder / ".xxh128sums").exists() and not (folder / ".incomplete").exists()
    )


def start(dump_folder: Path, ranks: int, attempt: int = 0, flags: Sequence[str] = ()) -> jobs.Job:
    arguments = [*JOB, f"--job.dump_folder={dump_folder}", *flags]
    return jobs.start(arguments, dump_folder / f"logs_{attempt}", ranks=ranks)


def unbroken(folder: Path, ranks: int) -> dict[int, tuple[float, float]]:
    outcome = start(folder / "unbroken", ranks).wait(START_SECONDS)
    assert outcome.exit_codes == [0] * ranks, outcome.output
    found = losses(folder / "unbroken")
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


MET = " job: "  # logged once the ranks know of each other; nobody misses one that never came
TRAINS = "step:  1 "


def wait_for(text: str, job: jobs.Job) -> None:
    """Rank 0 logs for all."""
    jobs.wait_until(lambda: text in job.output(), job, START_SECONDS)


def stop(folder: Path, ranks: int, draw: random.Random, expected: dict) -> str:
    rank = draw.randrange(ranks)
    with start(folder, ranks) as job:
        wait_for(TRAINS, job)
        time.sleep(draw.uniform(0, 3))
        steps_before = len(losses(folder))
        job.send(signal.SIGTERM, rank)
        outcome = job.wait(LIMIT_SECONDS)
    assert outcome.exit_codes == [0] * ranks, outcome.output
    last = max(losses(folder))
    assert whole_steps(folder)[-1] == last, f"step {last} is not saved"
    # One step may be logged while the signal is on its way, and one more be asked already.
    assert last <= max(steps_before, 1) + 2, f"went on from step {steps_before} to {last}"
    if last < STEPS:
        assert f"SIGTERM came to rank {rank}" in outcome.output, outcome.output
        outcome = start(folder, ranks, attempt=1).wait(START_SECONDS)
        assert outcome.exit_codes == [0] * ranks, outcome.output
    assert losses(folder) == expected
    return f"SIGTERM to rank {rank} in step {steps_before + 1}: saved step {last}"


def kill(folder: Path, ranks: int, draw: random.Random, expected: dict) -> str:
    rank = draw.randrange(ranks)
    with start(folder, ranks, flags=["--training.steps=1000"]) as job:
        wait_for(draw.choice([MET, TRAINS, TRAINS]), job)
        time.sleep(draw.uniform(0, 2))
        steps_before, sent_at = len(losses(folder)), time.monotonic()
        job.send(signal.SIGKILL, rank)
        outcome = job.wait(LIMIT_SECONDS)
        seconds = time.monotonic() - sent_at
    assert outcome.exit_codes == [-9 if r == rank else 1 for r in range(ranks)], outcome.output
    for other, output in enumerate(outcome.outputs):
        assert "Traceback" not in output and (other == rank or "error: rank" in output), output
    return f"SIGKILL to rank {rank} after step {steps_before}: the others gone in {seconds:.1f} s"


def restart(folder: Path, ranks: int, draw: random.Random, expected: dict) -> str:
    folder.mkdir(parents=True)
    with open(folder / "log", "w") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            + ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            + ["-m", "torchtitan.train", *JOB, f"--job.dump_folder={folder}"],
            cwd=jobs.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)},
            stdout=log,
            stderr=log,
        )
    try:
        killed_after = draw.randrange(1, STEPS)
        jobs.wait_until(lambda: len(losses(folder)) >= killed_after, None, START_SECONDS)
        workers = children(launcher.pid)
        assert len(workers) == ranks, (folder / "log").read_text()
        os.kill(draw.choice(workers), signal.SIGKILL)
        code = launcher.wait(START_SECONDS)
    finally:
        launcher.terminate()
        launcher.wait(LIMIT_SECONDS)
    assert code == 0, (folder / "log").read_text()
    assert losses(folder) == expected
    return f"SIGKILL to a rank after step {killed_after}: torchrun started all again"


def children(pid: int) -> list[int]:
    """The ranks that torchrun has started."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in pids if b"torchtitan.train" in Path(f"/proc/{p}/cmdline").read_bytes()]


KINDS: dict[str, Callable[[Path, int, random.Random, dict], str]] = {
    function.__name__: function for function in (stop, kill, restart)
}


def run(kind: str, trials: int, ranks: int, seed: int, folder: Path) -> int:
    """Run trials of a kind; return how many failed, whose folders are kept."""
    expected = unbroken(folder / kind, ranks)
    failed = 0
    for trial in range(trials):
        own, started = folder / kind / str(trial), time.monotonic()
        try:
            what = KINDS[kind](own, ranks, random.Random(f"{kind} {seed} {trial}"), expected)
        except AssertionError as error:
            failed += 1
            what = f"FAILED ({own}): {error}"
        else:
            shutil.rmtree(own)
        print(f"{kind:8} {trial + 1:3}  {time.monotonic() - started:5.1f} s  {what}", flush=True)
    print(f"{kind}: {trials - failed} of {trials} on {ranks} ranks", flush=True)
    return failed


def main() -> None:
    options = jobs.options_of(__doc__, trials=3, ranks=4, kinds=[*KINDS])
    folder = Path(tempfile.mkdtemp(prefix="stop_anywhere_"))
    numbers = options.trials, options.ranks, options.seed
    failed = sum(run(kind, *numbers, folder) for kind in options.kinds)
    if not failed:
        shutil.rmtree(folder)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
