"""Write docs/faults.md: `python -m tests.reliability.faults`."""

import re
import sys

from tests.reliability import jobs
from tests.reliability.faults import CHAPTERS, LIMIT_SECONDS, Fault, all_faults, chapter

BOOK = jobs.ROOT / "docs/faults.md"
INTRODUCTION = """\
# What can go wrong

Each of these {count} faults has a test that brings it about and compares what is printed, the exit code
and what is left on disk; none takes longer than {limit} seconds. `…` stands for what varies. This
page is written by `python -m tests.reliability.faults` from the tables under
`tests/reliability/faults/`, which the tests read: `pytest tests/reliability/test_faults.py -k NAME`
runs one.

Exit codes: 2, the config or the command cannot run as it stands; 1, data, files or another process
failed; 0, the job goes on or ends well, and the line is a warning. The whole stack behind a message is
printed with `TORCHTITAN_TRACEBACK=1`.
"""


def render() -> str:
    lines = [INTRODUCTION.format(count=len(all_faults()), limit=LIMIT_SECONDS)]
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
