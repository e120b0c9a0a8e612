"""The fault book: what can go wrong, what is said then, and what to do.

`book.md` has a row for each fault. Each module here has a dict FAULTS: how faults of a chapter are
brought about. `tests/reliability/test_faults.py` brings about every one of them, and compares with
its row; `python -m tests.reliability.faults [WORDS ...]` prints the rows that contain the words.
"""

import dataclasses
import functools
import importlib
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs

BOOK = Path(__file__).with_name("book.md")
LIMIT_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """What the book says about a fault.

    message: what is printed; "…" stands for anything on the way.
    exit_codes: of every rank, or of each.
    """

    chapter: str
    name: str
    message: str
    cause: str
    remedy: str
    exit_codes: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.chapter}: {self.name}"

    def __str__(self) -> str:
        codes = " and ".join(map(str, self.exit_codes))
        texts = {"cause": self.cause, "remedy": self.remedy, "exit code": codes}
        lines = (f"  {name}: {text}" for name, text in texts.items())
        return "\n".join((self.title, f"    {self.message}", *lines))


@dataclasses.dataclass(frozen=True)
class Fault:
    """How to bring a fault about.

    arrange: called with an empty folder; prepares files in it, and returns the arguments that are
        added to those of a tiny job whose dump folder is `<folder>/outputs`.
    after_run: `<folder>/outputs` holds a finished run of 4 steps, with full checkpoints of steps
        2 and 4, when `arrange` is called.
    whole_command: `arrange` returns all arguments, and nothing is added.
    absent: what must not be printed.
    check: called with the folder afterwards; says with `assert` what must hold on disk.
    """

    arrange: Callable[[Path], Sequence[str]]
    after_run: bool = False
    module: str = "torchtitan.train"
    ranks: int = 1
    environment: dict[str, str | None] = dataclasses.field(default_factory=dict)
    arguments_of_rank: dict[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    whole_command: bool = False
    absent: tuple[str, ...] = ()
    check: Callable[[Path], None] | None = None


@functools.cache
def read_book() -> list[Row]:
    rows, chapter = [], ""
    for line in BOOK.read_text().splitlines():
        if line.startswith("## "):  # "## module: heading"
            chapter = line[3:].partition(":")[0]
        elif line.startswith("| ") and not line.startswith("| fault |"):
            cells = [cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")]
            name, message, cause, remedy, codes = cells
            message = "\n".join(part.strip("` ") for part in message.split("<br>"))
            exit_codes = tuple(map(int, codes.split(" and ")))
            rows.append(Row(chapter, name, message, cause, remedy, exit_codes))
    return rows


def faults() -> dict[str, Fault]:
    """Return title -> how to bring the fault about."""
    found = {}
    for chapter in dict.fromkeys(row.chapter for row in read_book()):
        for name, fault in importlib.import_module(f"{__name__}.{chapter}").FAULTS.items():
            is_whole = isinstance(fault, Fault)
            found[f"{chapter}: {name}"] = fault if is_whole else Fault(arrange=fault)
    return found


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


SAVING = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no_last_save_model_only"]


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
