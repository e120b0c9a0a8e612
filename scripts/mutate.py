#!/usr/bin/env python
"""Change one line of the package at a time, and check that the nearest tests fail.

    scripts/mutate.py                     every mutation of scripts/mutations.toml
    scripts/mutate.py step rl/losses.py   mutations of files whose path contains one of these
    scripts/mutate.py 12 40-60            mutations by number
    scripts/mutate.py --check             only check that every old text occurs once in its file
    scripts/mutate.py --results FILE      append outcomes to FILE, and skip mutations that are in it;
                                          with --again repeat those that survived or timed out

Each mutation is made in a copy of the tree, where `pytest -x -m "not slow"` runs its tests. It is
killed if a test fails. If all tests pass, it has survived, and a test is missing, unless the new text
means the same. A mutation may take three times as long as its tests take without it.

The test processes, and the ranks of distributed tests, are forked from this process, which has torch
and other libraries loaded (but not torchtitan). Needs Linux.
"""

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter, defaultdict
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutations.toml"
PRELOADED = (
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "torchdata.stateful_dataloader",
    "datasets",
    "safetensors.torch",
    "tokenizers",
    "transformers",
)
_SECONDS_BESIDES = 15


class Mutation(NamedTuple):
    number: int
    file: str
    """Below torchtitan/."""
    old: str
    new: str
    tests: str
    """Arguments of pytest."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.old, self.new

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.number:3} {self.file}: {old}  ->  {new or 'nothing'}"


def read_list(path: Path = LIST) -> list[Mutation]:
    """Return the mutations; raises ValueError with all whose old text does not occur exactly once."""
    mutations, problems = [], []
    for file, section in tomllib.loads(path.read_text()).items():
        text = (ROOT / "torchtitan" / file).read_text()
        for old, new, *tests in section["mutations"]:
            number = len(mutations) + 1
            mutation = Mutation(number, file, old, new, *(tests or [section["tests"]]))
            mutations.append(mutation)
            if text.count(old) != 1 or old == new:
                problems.append(f"{mutation}  ({text.count(old)} times)")
    if problems:
        raise ValueError("these old texts must occur once and change:\n" + "\n".join(problems))
    return mutations


def choose(mutations: list[Mutation], wanted: list[str]) -> list[Mutation]:
    """Return the mutations whose number or path is wanted; all if `wanted` is empty."""
    numbers, paths = set(), []
    for word in wanted:
        first, _, last = word.partition("-")
        if first.isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
        else:
            paths.append(word.removeprefix("torchtitan/"))
    return [
        m
        for m in mutations
        if not wanted or m.number in numbers or any(path in m.file for path in paths)
    ]


class Tree:
    """A copy of this tree in a temporary folder, in which tests run."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        compiled = [self.root / "torchtitan", self.root / "tests"]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *compiled], check=True)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation):
        path = self.root / "torchtitan" / mutation.file
        text, status = path.read_text(), path.stat()
        path.write_text(text.replace(mutation.old, mutation.new))
        # Python would use the old compiled code if the file's size and its second of change fit.
        os.utime(path, (status.st_atime, status.st_mtime + 10))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (status.st_atime, status.st_mtime))

    def run(self, tests: str, log: Path, limit_seconds: float) -> tuple[int | None, float]:
        """Return (pytest's exit code, or None after a time-out; seconds)."""
        started = time.monotonic()
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples of earlier runs
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            self._run_pytest(tests, log)
        code = None
        try:
            while time.monotonic() - started < limit_seconds:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    break
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            if code is None:
                os.waitpid(process, 0)
            # Ranks that outlive the test are children of the fork server.
            server = forkserver._forkserver._forkserver_pid
            for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        return code, time.monotonic() - started

    def _run_pytest(self, tests: str, log: Path) -> NoReturn:
        """Run pytest in this forked process, and end the process."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(self.root)
        sys.path[0] = os.environ["PYTHONPATH"] = str(self.root)
        # The fork server runs already, but this would look for it among this process's children.
        forkserver._forkserver.ensure_running = lambda: None
        # New processes import the main module.
        sys.modules["__main__"] = types.ModuleType("__main__")
        import pytest

        options = ["-x", "-q", "--assert=plain", "-m", "not slow"]
        options += ["-p", "no:cacheprovider", "-o", "addopts="]
        code = 99
        try:
            code = int(pytest.main([*options, *shlex.split(tests)]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def preload() -> None:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",  # or a mutation's code would be used later
    }
    sys.dont_write_bytecode = True
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    streams = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "wb") as nowhere:  # the output of ranks
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    forkserver.ensure_running()
    for stream, kept in zip((1, 2), streams, strict=True):
        os.dup2(kept, stream)
        os.close(kept)
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def run_all(mutations: list[Mutation], results: Path | None, tree: Tree, log: Path) -> None:
    seconds_of: dict[str, float] = {}  # tests -> their time without a mutation
    # Tests of several processes come last.
    for mutation in sorted(mutations, key=lambda m: (m.tests.startswith("tests/d"), m.tests)):
        tests = mutation.tests
        if tests not in seconds_of:
            code, seconds_of[tests] = tree.run(tests, log, 600)
            if code != 0:
                print(log.read_text(errors="replace")[-3000:])
                seconds_of[tests] = math.nan
            print(
                f"{'' if code == 0 else 'fails':8} {seconds_of[tests]:5.1f} s  {tests}", flush=True
            )
        if math.isnan(seconds_of[tests]):  # the tests fail without a mutation
            continue
        with tree.mutated(mutation):
            limit_seconds = _SECONDS_BESIDES + 3 * seconds_of[tests]
            code, seconds = tree.run(tests, log, limit_seconds)
        outcome = {None: "timeout", 0: "survived"}.get(code, "killed")
        if code in (4, 5):
            raise SystemExit(f"pytest {tests} has no tests: {mutation}")
        print(f"{outcome:8} {seconds:5.1f} s  {mutation}", flush=True)
        if results is not None:
            last_lines = log.read_text(errors="replace").splitlines()[-3:]
            row = {"key": mutation.key, "outcome": outcome, "seconds": seconds, "end": last_lines}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_results(path: Path) -> dict[tuple[str, ...], str]:
    """Return (file, old, new) -> the last outcome."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {tuple(row["key"]): row["outcome"] for row in rows}


def table(mutations: list[Mutation], outcomes: dict[tuple[str, ...], str]) -> str:
    """Return the outcomes by folder, followed by the mutations that were not killed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    known = [m for m in mutations if m.key in outcomes]
    for mutation in known:
        for folder in (mutation.file.partition("/")[0], "all"):
            counts[folder][outcomes[mutation.key]] += 1
    lines = [f"{'':12} killed survived timeout  share"]
    for folder, n in sorted(counts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        share = n["killed"] / n.total()
        lines.append(f"{folder:12} {n['killed']:6} {n['survived']:8} {n['timeout']:7} {share:6.1%}")
    return "\n".join(
        lines + [f"{outcomes[m.key]:8} {m}" for m in known if outcomes[m.key] != "killed"]
    )


def main() -> None:
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wanted", nargs="*", help="numbers, ranges of numbers, parts of paths")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, help="a file of JSON lines")
    parser.add_argument(
        "--again", action="store_true", help="repeat mutations that were not killed"
    )
    arguments = parser.parse_args()
    try:
        chosen = choose(read_list(), arguments.wanted)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if arguments.check:
        print(f"{len(chosen)} mutations")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and clean up
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder, "results")
        found = read_results(results)
        done = {key for key, what in found.items() if what == "killed" or not arguments.again}
        preload()
        tree = Tree(str(Path(folder, "tree")))
        try:
            run_all([m for m in chosen if m.key not in done], results, tree, Path(folder, "log"))
        finally:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        print(table(chosen, read_results(results)))


if __name__ == "__main__":
    main()
