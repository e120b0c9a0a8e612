"""Checks that this torchtitan keeps the engine's contract; for the CI of embedding programs.

    python -m torchtitan.testing.conformance               one process
    python -m torchtitan.testing.conformance --nproc 2     FSDP, DDP, TP, PP, CP and EP on two
    python -m torchtitan.testing.conformance --only save   checks with "save" in their name

Runs on gloo ranks of this machine, without network, data or accelerator. Prints each check's outcome
and the sentence that it checks. Exits with code 1 if a check failed. The checks are in `contract.py`.
"""

import argparse
import sys
import tempfile
import time

from torchtitan.testing.contract import CHECKS, Check, run_on_rank
from torchtitan.testing.gloo import RankFailure, RankTimeout, run_ranks


def run_check(check: Check, nproc: int, timeout_seconds: float = 240.0) -> tuple[str, str]:
    """Run a check on new ranks; return (outcome, reason), with outcome "pass", "FAIL" or "skip"."""
    if nproc < check.min_ranks:
        return "skip", f"needs {check.min_ranks} ranks"
    with tempfile.TemporaryDirectory(prefix="conformance_") as folder:
        try:
            run_ranks(run_on_rank, nproc, check, folder, timeout_seconds=timeout_seconds)
        except (RankFailure, RankTimeout) as problem:
            return "FAIL", str(problem)
    return "pass", ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.testing.conformance",
        description="Check the engine's contract with programs that embed it.",
    )
    parser.add_argument("--nproc", type=int, default=1, choices=(1, 2, 4), help="ranks (1)")
    parser.add_argument("--only", default="", help="run checks with this in their name")
    args = parser.parse_args(arguments)
    chosen = {name: check for name, check in CHECKS.items() if args.only in name}
    if not chosen:
        parser.error(f"--only {args.only!r} is in no check's name; there are {', '.join(CHECKS)}")
    width = max(map(len, chosen))
    outcomes, problems = [], []
    started = time.monotonic()
    for name, check in chosen.items():
        before = time.monotonic()
        outcome, why = run_check(check, args.nproc)
        text = why if outcome == "skip" else check.holds
        print(f"{outcome}  {name:{width}}  {time.monotonic() - before:5.1f} s  {text}", flush=True)
        outcomes.append(outcome)
        problems += [f"\n{name}: {check.holds}\n{why}"] if outcome == "FAIL" else []
    words = {"pass": "passed", "FAIL": "failed", "skip": "skipped"}
    counts = ", ".join(f"{outcomes.count(outcome)} {word}" for outcome, word in words.items())
    print(
        f"{counts}, on {args.nproc} rank(s), {time.monotonic() - started:.0f} s",
        *problems,
        sep="\n",
    )
    return int("FAIL" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
