"""Write docs/faults.md: `python -m tests.reliability.faults`."""

import re
import sys

from tests.reliability import jobs
from tests.reliability.faults import CHAPTERS, LIMIT_SECONDS, Fault, all_faults, chapter

BOOK = jobs.ROOT / "docs/faults.md"
INTRODUCTION = """\
# What can go wrong

Each of these {count} faults has a test that brings it about and compares what is printed, the exit
code and what is left on disk; none takes longer than {limit} seconds. `…` stands for what varies. This
page is written by `python -m tests.reliability.faults` from the tables under
`tests/reliability/faults/`, which the tests read: `pytest tests/reliability/test_faults.py -k NAME`
runs one.

Exit codes: 2, the config or the command cannot run as it stands; 1, data, files or another process
failed; 0, the job goes on or ends well, and the line is a warning. The whole stack behind a message is
printed with `TORCHTITAN_TRACEBACK=1`.

## At random instants

What no table can list is tried at random; CI runs a few trials of each (2 cores, CPU, gloo, torch
2.13).

{trials}
"""

# What was tried, how often it passed, the command.
TRIALS = [
    (
        "SIGKILL to all ranks at any instant of a run that saves at each step, damage (a file of a "
        "checkpoint truncated, a bit of it flipped, or the file deleted) in two of five: the run "
        "continues from its newest whole step and repeats the unbroken run's losses bitwise; 1 and 2 "
        "ranks, sync, async, with validation, data workers, Hugging Face export, RL",
        "500 of 500; 373 resumed, and of 127 no whole step was left: they began again, or were "
        "refused where damage was to blame; 146 were damaged",
        "python -m tests.reliability.kill_anywhere --trials 500",
    ),
    (
        "SIGTERM to one of 4 ranks: all save and exit with 0, and the run goes on to the unbroken "
        "run's losses",
        "50 of 50",
        "python -m tests.reliability.stop_anywhere --kinds stop --trials 50",
    ),
    (
        "SIGKILL to one of 4 ranks: the others are gone within 30 s (at most 2.1 s), and say why",
        "30 of 30",
        "python -m tests.reliability.stop_anywhere --kinds kill --trials 30",
    ),
    (
        "the same under `torchrun --max-restarts 1`: the run ends with the unbroken run's losses",
        "30 of 30",
        "python -m tests.reliability.stop_anywhere --kinds restart --trials 30",
    ),
    (
        "a failure of one of 2 ranks at a random place or instant of an engine's steps (a caller's "
        "function, a layer, Ctrl-C), under FSDP, DDP, tensor, pipeline and context parallelism: all "
        "ranks raise within 5 s (at most 2.4 s), and the engine, or a new one, has the gradients of "
        "one to which nothing happened, bitwise",
        "150 of 150",
        "python -m tests.reliability.fail_anywhere --trials 30",
    ),
    (
        "10,000 samples read by 4, then 1, 3 and 2 ranks, packed and not, with data workers and "
        "without: none lost, none repeated",
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
        lines += [_entry(module, fault) for fault in chapter(module)]
    return "\n".join(lines)


def title_of(module: str, fault: Fault) -> str:
    return f"{module}: {fault.name}"


def _entry(module: str, fault: Fault) -> str:
    codes = fault.exit_code if isinstance(fault.exit_code, tuple) else (fault.exit_code,)
    where = f", {fault.ranks} ranks" if fault.ranks > 1 else ""
    return (
        f"### {fault.name}\n\n"
        f"```\n{fault.message.strip()}\n```\n\n"
        f"Cause: {fault.cause}  \n"
        f"Remedy: {fault.remedy}  \n"
        f"Exit code {' and '.join(map(str, codes))}{where}; "
        f"test `test_fault_is_told[{title_of(module, fault)}]`\n"
    )


if __name__ == "__main__":
    BOOK.write_text(re.sub(r"\n{3,}", "\n\n", render()))
    sys.exit(0)
