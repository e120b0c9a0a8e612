"""Write docs/faults.md: `python -m tests.reliability.faults`."""

import dataclasses
import re
import sys

from tests.reliability import jobs
from tests.reliability.faults import CHAPTERS, LIMIT_SECONDS, Fault, all_faults, chapter

BOOK = jobs.ROOT / "docs/faults.md"
ABOVE = "As above"
INTRODUCTION = """\
# What can go wrong

Search this page for a few words of the message that you see. Each of the {count} faults has a test that
brings it about and compares the message, the exit code and what is left on disk. No fault takes longer
than {limit} seconds. `…` stands for text that varies.

| exit code | meaning |
|---|---|
| 0 | the job goes on or ends well, and the message is a warning |
| 1 | data, files or another process failed |
| 2 | the config or the command cannot run as it stands |

`TORCHTITAN_TRACEBACK=1` in the environment prints the whole stack behind a message.
`pytest tests/reliability/test_faults.py -k "WORDS"` runs the faults whose names contain the words. This page is
written by `python -m tests.reliability.faults` from the lists under `tests/reliability/faults/`, which
the tests read.

## At random instants

Faults that no list can hold are tried at random. CI runs a few trials of each (2 cores, CPU, gloo,
torch 2.13).

{trials}
"""

# What was tried, how often it passed, the command.
TRIALS = [
    (
        "SIGKILL to all ranks at any instant of a run that saves at each step. In two of five trials a "
        "file of a checkpoint is damaged too (truncated, a bit flipped, deleted). The run continues from "
        "its newest whole step and repeats the losses of the unbroken run bitwise. 1 and 2 ranks, sync, "
        "async, with validation, data workers, Hugging Face export, RL",
        "500 of 500. 373 resumed. In 127 no whole step was left: they began again, or were refused if "
        "damage was the reason. 146 were damaged",
        "python -m tests.reliability.kill_anywhere --trials 500",
    ),
    (
        "SIGTERM to one of 4 ranks: all ranks save and exit with 0, and the resumed run has the losses "
        "of the unbroken run",
        "50 of 50",
        "python -m tests.reliability.stop_anywhere --kinds stop --trials 50",
    ),
    (
        "SIGKILL to one of 4 ranks: the other ranks end within 30 s (at most 2.1 s were needed), and "
        "name the reason",
        "30 of 30",
        "python -m tests.reliability.stop_anywhere --kinds kill --trials 30",
    ),
    (
        "the same under `torchrun --max-restarts 1`: the run ends with the losses of the unbroken run",
        "30 of 30",
        "python -m tests.reliability.stop_anywhere --kinds restart --trials 30",
    ),
    (
        "a failure of one of 2 ranks at a random place or instant of an engine's steps (a caller's "
        "function, a layer, Ctrl-C), under FSDP, DDP, tensor, pipeline and context parallelism. All "
        "ranks raise within 5 s (at most 2.4 s were needed). The engine, or a new one, then has bitwise "
        "the gradients of an engine that never failed",
        "150 of 150",
        "python -m tests.reliability.fail_anywhere --trials 30",
    ),
    (
        "10,000 samples read by 4, then 1, 3 and 2 ranks, packed and not, with and without data "
        "workers: no sample is lost or repeated",
        "6 of 6 cases",
        "python -m tests.reliability.elastic_data",
    ),
]


def render() -> str:
    trials = ["| what | passed | command |", "|---|---|---|"]
    trials += [f"| {what} | {passed} | `{command}` |" for what, passed, command in TRIALS]
    lines = [
        INTRODUCTION.format(count=len(all_faults()), limit=LIMIT_SECONDS, trials="\n".join(trials))
    ]
    for module, heading in CHAPTERS.items():
        lines.append(f"## {heading}\n")
        lines += ["| fault | message | cause | remedy | exit code |", "|---|---|---|---|---|"]
        cause = remedy = ""  # of the last row that has its own
        for fault in chapter(module):
            cause = fault.cause if not fault.cause.startswith(ABOVE) else cause
            remedy = fault.remedy if not fault.remedy.startswith(ABOVE) else remedy
            texts = {"cause": _full(fault.cause, cause), "remedy": _full(fault.remedy, remedy)}
            lines.append(_row(dataclasses.replace(fault, **texts)))
        lines.append("")
    return "\n".join(lines)


def title_of(module: str, fault: Fault) -> str:
    return f"{module}: {fault.name}"


def _full(text: str, above: str) -> str:
    """The text, with `above` in place of "As above": a reader who searches sees a single row."""
    if not text.startswith(ABOVE):
        return text
    further = text.removeprefix(ABOVE).lstrip(".; ")
    is_key = "." in further.partition(" ")[0].rstrip(".")
    return f"{above} {further if is_key else further[:1].upper() + further[1:]}".strip()


def _row(fault: Fault) -> str:
    codes = fault.exit_code if isinstance(fault.exit_code, tuple) else (fault.exit_code,)
    where = f"{fault.ranks} ranks: " if fault.ranks > 1 else ""
    # One code span per line of the message: a table's cell has no line breaks of its own.
    message = "<br>".join(f"`` {line.strip()} ``" for line in fault.message.strip().splitlines())
    cells = (
        fault.name,
        message,
        fault.cause,
        fault.remedy,
        where + " and ".join(map(str, codes)),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    BOOK.write_text(re.sub(r"\n{3,}", "\n\n", render()))
    sys.exit(0)
