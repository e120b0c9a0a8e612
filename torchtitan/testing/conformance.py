"""Does this build of torchtitan keep the engine's contract? Named checks, for an embedder's CI.

    python -m torchtitan.testing.conformance               one process
    python -m torchtitan.testing.conformance --nproc 2     FSDP, DDP, TP, PP, CP and EP on two
    python -m torchtitan.testing.conformance --only save   checks with "save" in their name

Runs on gloo ranks of this machine, without network, data or accelerator, and prints what each
check holds. Exit code 1 if one failed. The checks are in `conformance_checks.py`.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.testing.gloo import RankFailure, RankTimeout, run_ranks

CHECK_TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Result:
    """name: of the check. outcome: "pass", "FAIL" or "skip". problem: why, if it did not pass."""

    name: str
    row: str
    outcome: str
    seconds: float
    holds: str
    problem: str = ""


class CheckFailed(Exception):
    """(name, traceback, its seconds)."""


def run_checks(
    nproc: int, only: str = "", timeout_seconds: float = CHECK_TIMEOUT_SECONDS
) -> list[Result]:
    """Run all checks, or those with `only` in their name, on `nproc` ranks; results in order.

    timeout_seconds: for each check.
    A check that fails or hangs takes its ranks along; the checks after it go on on new ones.
    """
    from torchtitan.testing.conformance_checks import CHECKS

    chosen = [check for check in CHECKS.values() if only in check.name]
    if not chosen:
        raise ValueError(f"--only {only!r} is in no check's name; there are {', '.join(CHECKS)}")
    seconds: dict[str, float] = {}
    problems: dict[str, str] = {}
    pending = [check.name for check in chosen if nproc >= check.min_ranks]
    with tempfile.TemporaryDirectory(prefix="conformance_") as folder:
        while pending:
            _run_until_failure(pending, nproc, folder, timeout_seconds, seconds, problems)
            pending = [name for name in pending if name not in seconds]
    results = []
    for check in chosen:
        outcome, problem = "pass", problems.get(check.name, "")
        if nproc < check.min_ranks:
            outcome, problem = "skip", f"needs {check.min_ranks} ranks"
        elif problem:
            outcome = "FAIL"
        taken = seconds.get(check.name, 0.0)
        results.append(Result(check.name, check.row, outcome, taken, check.holds, problem))
    return results


def _run_until_failure(
    pending: list[str],
    nproc: int,
    folder: str,
    timeout_seconds: float,
    seconds: dict[str, float],
    problems: dict[str, str],
) -> None:
    """Run checks on one set of ranks; note in `seconds` all that ran, in `problems` what failed."""
    progress = Path(folder) / "progress"
    progress.write_text("")
    failed, problem, taken = "", "", 0.0
    try:
        run_ranks(
            _run_on_rank,
            nproc,
            pending,
            progress,
            timeout_seconds=timeout_seconds,
            init_process_group=False,
            progress=progress,
        )
    except RankFailure as failure:
        error = failure.__cause__
        if isinstance(error, CheckFailed):
            failed, problem, taken = error.args
        else:  # the process died
            problem = str(failure)
    except RankTimeout as timeout:
        problem = f"did not end within {timeout_seconds:.0f} seconds\n{timeout}"
        taken = timeout_seconds
    for line in progress.read_text().splitlines():
        passed, its_seconds = line.split("\t")
        seconds[passed] = float(its_seconds)
    if problem:
        failed = failed or next((name for name in pending if name not in seconds), pending[-1])
        seconds[failed], problems[failed] = taken, problem


def _run_on_rank(names: list[str], progress: Path) -> None:
    """Rank 0 adds a line to `progress` when a check has passed; CheckFailed at the first that fails."""
    import torch.distributed as dist

    from torchtitan.testing.conformance_checks import CHECKS, Kit

    kit = Kit(str(progress.parent))
    for name in names:
        started = time.monotonic()
        try:
            CHECKS[name].function(kit)
        except BaseException:
            raise CheckFailed(name, traceback.format_exc(), time.monotonic() - started) from None
        dist.barrier()  # a rank that is ahead would fail or hang in a check that is not to blame
        if kit.rank == 0:
            with progress.open("a") as file:
                file.write(f"{name}\t{time.monotonic() - started}\n")
    kit.close()
    dist.barrier()


def table(results: Sequence[Result]) -> str:
    """One line for each result, and a sum."""
    width = max(len(result.name) for result in results)
    lines = [
        f"{r.outcome}  {r.row:3}  {r.name:{width}}  {r.seconds:5.1f} s  "
        f"{r.problem if r.outcome == 'skip' else r.holds}"
        for r in results
    ]
    counts = ", ".join(
        f"{sum(r.outcome == outcome for r in results)} {word}"
        for outcome, word in (("pass", "passed"), ("FAIL", "failed"), ("skip", "skipped"))
    )
    return "\n".join([*lines, counts])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.testing.conformance",
        description="Check the engine's contract with programs that embed it.",
    )
    parser.add_argument("--nproc", type=int, default=1, choices=(1, 2, 4), help="ranks (1)")
    parser.add_argument("--only", default="", help="run checks with this in their name")
    args = parser.parse_args(arguments)
    started = time.monotonic()
    results = run_checks(args.nproc, args.only)
    print(table(results) + f", on {args.nproc} rank(s), {time.monotonic() - started:.0f} s")
    for result in results:
        if result.outcome == "FAIL":
            print(f"\n{result.name}: {result.holds}\n{result.problem}")
    return int(any(result.outcome == "FAIL" for result in results))


if __name__ == "__main__":
    sys.exit(main())
