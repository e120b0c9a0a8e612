"""Jobs started as a user starts them, several in a second: `python -m MODULE ARGUMENTS` on one or
more ranks, forked from a server that has torch and this package loaded.

For tests that need many runs, and for those that kill them.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchtitan.testing.gloo import PRELOADED_MODULES

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests/assets/tokenizer"


def flags_in(keys_and_values: str) -> list[str]:
    """One flag for each word, such as `training.steps=4`."""
    return [f"--{word}" for word in keys_and_values.split()]


# A job of milliseconds per step, repeated bit for bit when it is run again.
TINY_JOB = flags_in(f"""
    model.name=llama3 model.flavor=debugmodel experimental.custom_import=tests.reliability.tiny_flavor
    model.hf_assets_path={TOKENIZER} training.dataset=local
    training.dataset_path={ROOT}/tests/assets/c4_test/data.json training.steps=4
    training.seq_len=32 training.local_batch_size=1 training.mixed_precision_param=float32
    activation_checkpoint.mode=none lr_scheduler.warmup_steps=1 debug.seed=3 metrics.log_freq=1
""")


def logged_steps(dump_folder: Path) -> list[tuple[int, tuple[float, float]]]:
    """Return (step, (loss, gradient norm)) of each line of a run's metrics, in their order."""
    path, rows = dump_folder / "metrics.jsonl", []
    for line in path.read_text().split("\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a line that was cut by a kill, or the empty one at the end
            continue
        if "grad_norm" in row:
            loss = row.get("loss_metrics/global_avg_loss", row.get("loss"))
            rows.append((row["step"], (loss, row["grad_norm"])))
    return rows


@dataclasses.dataclass
class Outcome:
    """How a job ended."""

    exit_codes: list[int | None]  # of each rank; negative: the signal; None: it had to be killed
    seconds: float
    outputs: list[str]  # stdout and stderr of each rank

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


# `Process.start` reads the exit codes of all processes that have ended, and two readers of one
# code get it wrong: callers run jobs in several threads.
_reading_exit_codes = threading.Lock()


def _exit_code(process: BaseProcess, timeout_seconds: float | None = 0) -> int | None:
    """None if it has not ended in time."""
    connection.wait([process.sentinel], timeout_seconds)
    with _reading_exit_codes:
        return process.exitcode


class Job:
    """A job that was started; end it with `wait` or `kill`, or use it in a `with` statement."""

    def __init__(self, processes: list[BaseProcess], logs: list[Path]) -> None:
        self.processes, self.logs = processes, logs
        self._started = time.monotonic()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def send(self, signal_number: int, rank: int = 0) -> None:
        process = self.processes[rank]
        if _exit_code(process) is None:
            os.kill(process.pid, signal_number)

    def is_running(self) -> bool:
        return any(_exit_code(process) is None for process in self.processes)

    def output(self, rank: int = 0) -> str:
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def wait(self, timeout_seconds: float = 30) -> Outcome:
        """What became of the job. Ranks that have not ended in time are killed."""
        deadline = time.monotonic() + timeout_seconds
        exit_codes = [
            _exit_code(process, max(0.0, deadline - time.monotonic())) for process in self.processes
        ]
        seconds = time.monotonic() - self._started
        self.kill()
        return Outcome(exit_codes, seconds, [self.output(r) for r in range(len(self.logs))])

    def kill(self) -> None:
        for process in self.processes:
            if _exit_code(process) is None:
                process.kill()
                _exit_code(process, None)


def start(
    arguments: Sequence[str],
    folder: Path,
    *,
    module: str = "torchtitan.train",
    ranks: int = 1,
    environment: dict[str, str | None] | None = None,
    arguments_of_rank: dict[int, Sequence[str]] | None = None,
) -> Job:
    """Start `python -m MODULE ARGUMENTS` (or a script, by its path) on `ranks` ranks.

    folder: what the ranks print goes to rank_<r>.log there.
    environment: added to the present one; None removes a variable.
    arguments_of_rank: appended for one rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        variables |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    processes, logs = [], []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        merged = dict(os.environ) | variables | own | (environment or {})
        log = folder / f"rank_{rank}.log"
        process = context.Process(
            target=_run,
            args=(
                module,
                [*arguments, *(arguments_of_rank or {}).get(rank, [])],
                {name: value for name, value in merged.items() if value is not None},
                str(log),
            ),
            daemon=False,  # a job may have data workers
        )
        with _reading_exit_codes:
            process.start()
        processes.append(process)
        logs.append(log)
    return Job(processes, logs)


def run(arguments: Sequence[str], folder: Path, timeout_seconds: float = 30, **options) -> Outcome:
    """`start`, then `wait`."""
    return start(arguments, folder, **options).wait(timeout_seconds)


def _run(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    gc.freeze()  # a collection would touch, and so copy, all memory shared with the server
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # data workers as in a process of its own
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(str(ROOT / module), run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def options_of(doc: str, **defaults: int | bool | list[str]) -> argparse.Namespace:
    """Parse the options of a program of trials. A list has the choices, all of which are the default."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, default in {**defaults, "seed": 0}.items():
        kind = {"type": int} if not isinstance(default, bool) else {"action": "store_true"}
        if isinstance(default, list):
            kind = {"nargs": "+", "choices": default}
        parser.add_argument(f"--{name}", default=default, **kind)
    return parser.parse_args()


def wait_until(is_true: Callable[[], object], job: Job | None, seconds: float) -> None:
    """Poll; AssertionError once the time is over, or the job is."""
    deadline = time.monotonic() + seconds
    while not is_true():
        is_running = job is None or job.is_running()
        assert is_running and time.monotonic() < deadline, job and job.output()
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
