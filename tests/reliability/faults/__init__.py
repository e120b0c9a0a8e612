"""The fault book: what can go wrong, what is said then, and what to do.

Each module here has a list FAULTS. `tests/reliability/test_faults.py` brings every one of them
about; `python -m tests.reliability.faults` prints the same lists.
"""

import dataclasses
import importlib
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs

# module -> heading in the book
CHAPTERS = {
    "config": "Config",
    "data": "Data and tokenizer",
    "order": "Order, mixtures and packing of data",
    "chats": "Chats",
    "tokens": "Token files",
    "checkpoints": "Saving and resuming",
    "weights": "Weights, conversions, damaged and hostile files",
    "processes": "Processes, ranks and signals",
    "training": "Numbers and training",
    "rl": "Reinforcement learning",
}
LIMIT_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and how to bring it about.

    message: what is printed; "…" stands for anything on the way.
    arrange: called with an empty folder; prepares files in it, and returns the arguments that are
        added to those of a tiny job whose dump folder is `<folder>/outputs`.
    exit_code: of every rank, or of each.
    after_run: `<folder>/outputs` holds a finished run of 4 steps, with full checkpoints of steps
        2 and 4, when `arrange` is called.
    whole_command: `arrange` returns all arguments, and nothing is added.
    absent: what must not be printed.
    check: called with the folder afterwards; says with `assert` what must hold on disk.
    """

    name: str  # the title in the book
    message: str
    cause: str
    remedy: str
    arrange: Callable[[Path], Sequence[str]]
    exit_code: int | tuple[int, ...] = 2
    after_run: bool = False
    module: str = "torchtitan.train"
    ranks: int = 1
    environment: dict[str, str | None] = dataclasses.field(default_factory=dict)
    arguments_of_rank: dict[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    whole_command: bool = False
    absent: tuple[str, ...] = ()
    check: Callable[[Path], None] | None = None


def chapter(name: str) -> list[Fault]:
    return importlib.import_module(f"{__name__}.{name}").FAULTS


def bring_about(fault: Fault, folder: Path, finished_run: Path) -> jobs.Outcome:
    """Run the job that has this fault; `finished_run` is what `finish_a_run` has made."""
    if fault.after_run:
        shutil.copytree(finished_run, folder / "outputs")
    arguments = list(fault.arrange(folder))
    if not fault.whole_command:
        arguments = [*jobs.TINY_JOB, f"--job.dump_folder={folder}/outputs", *arguments]
    return jobs.run(
        arguments,
        folder / "logs",
        LIMIT_SECONDS,
        module=fault.module,
        ranks=fault.ranks,
        environment={"XDG_CACHE_HOME": f"{folder}/cache"} | fault.environment,
        arguments_of_rank=fault.arguments_of_rank,
    )


SAVING = [
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.no_last_save_model_only",
]


def finish_a_run(folder: Path) -> Path:
    """The dump folder of a run of 4 steps, for faults that happen after one."""
    outcome = jobs.run(
        [*jobs.TINY_JOB, *SAVING, f"--job.dump_folder={folder}/outputs"], folder / "logs", 60
    )
    assert outcome.exit_codes == [0], outcome.output
    return folder / "outputs"


def says(output: str, message: str) -> bool:
    """Whether `message`, in which "…" stands for anything, is in `output`; any space is one."""
    parts = [re.escape(" ".join(part.split())) for part in message.split("…")]
    return re.search(".*?".join(parts), " ".join(output.split())) is not None
