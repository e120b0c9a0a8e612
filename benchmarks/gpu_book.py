"""Runs all that only a GPU can show, section by section; scripts/run_gpu_book.sh calls it.

    python benchmarks/gpu_book.py OUT [--full] [--only tests throughput]
    python benchmarks/gpu_book.py OUT --dry-run        # on a CPU, in small: does each section run?

Each section is a command with a time limit, and the next one runs whatever came of it. OUT gets
book.json, book.md and book.log, the output of all sections; both books are written again after
every section, so that a run cut short has told what it found. Tables that sections print are in the book.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import inspect
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from common import ROOT

OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
# In `pytest -v`: the test first, or with several processes the outcome.
_OUTCOME = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] (?P<result>{'|'.join(OUTCOMES)}) (?P<test>\S.*?)"
    rf"|(?P<test_alone>tests/\S.*?) (?P<result_alone>{'|'.join(OUTCOMES)})(?: .*)?)\s*$"
)
# What a section has to end by itself, after its limit, before it is killed.
SECONDS_TO_END = 10.0
# Without --full, all sections together: some machines are lent for ten minutes a command.
QUICK_SECONDS = 530.0
MODULES = {"protobuf": "google.protobuf"}  # of packages that are imported by another name


@dataclasses.dataclass(frozen=True)
class Section:
    """command: without the interpreter. seconds: its limit, None for what is left of QUICK_SECONDS.

    full_command: with --full, whose limit is an hour. dry: arguments of a dry run; None if there is none.
    """

    name: str
    command: list[str]
    seconds: float | None
    full_command: list[str] | None = None
    dry: list[str] | None = None


@dataclasses.dataclass
class Entry:
    """What came of a section. outcome: ok, failed, out of time, or no GPU."""

    section: str
    outcome: str
    seconds: float = 0.0
    command: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    table: list[str] = dataclasses.field(default_factory=list)
    figures: Any = None


def pytest_command(*arguments: str, processes: int, dist: str = "loadfile") -> list[str]:
    """On several processes, which share the card, if pytest-xdist is there."""
    command = ["-m", "pytest", "-v", "--color=no", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(processes, os.cpu_count() or 1)), f"--dist={dist}"]
    return [*command, *arguments]


def sections(out: Path) -> list[Section]:
    """In the order of what is most wanted, should time run out; `tests` gets what is left."""
    from tests.conftest import ON_THE_DEVICE  # imports what `preflight` looks for

    def benchmark(name: str, section: str, *arguments: str) -> list[str]:
        return [f"benchmarks/{name}.py", "--json", str(out / f"{section}.json"), *arguments]

    untuned = ("-p", "tests.gpu.untuned")
    quick = ("--attn-types", "flex", "--blocks", "3")
    small = ["--models", "debugmodel", "--steps", "1", "--blocks", "1"]
    throughput = benchmark("throughput", "throughput")
    qwen = ("--models", "Qwen 3.5 0.8B", "--attn-types", "varlen", "--blocks", "3")
    trees = "--flavor 1B --dtype bfloat16 --seq_len 16384 --steps 3 --compile".split()
    on_device = [path for path in ON_THE_DEVICE if path != "tests/gpu/"]
    kernels = ("tests/gpu", "--ignore=tests/gpu/test_one_device.py")  # which runs above
    everything = ("tests/unit", "tests/compat", "tests/reference", "tests/distributed")
    return [
        Section("attention", benchmark("attention", "attention"), 60, dry=["--seq-len", "256"]),
        Section("throughput", [*throughput, *quick], 110, throughput, dry=small),
        Section("qwen3_5", benchmark("throughput", "qwen3_5", *qwen), 70, dry=small),
        Section(
            "trees", benchmark("trees", "trees", *trees), 70,
            dry=["--steps", "1", "--flavor", "debugmodel", "--dtype", "float32", "--seq_len", "2048"],
        ),
        Section(
            "ranks on one device",
            pytest_command("tests/gpu/test_one_device.py", processes=4, dist="load"), 90, dry=[],
        ),
        Section("waits", benchmark("device_waits", "waits"), 60),
        Section(
            "unit", pytest_command(*untuned, *on_device, processes=14), 50,
            pytest_command(*everything, processes=4),
        ),
        # Most of their time is the compiler's, on the CPU.
        Section(
            "tests", pytest_command(*untuned, *kernels, processes=14, dist="load"), None,
            pytest_command(*kernels, processes=8, dist="load"),
        ),
    ]  # fmt: skip


# ---- before the first section ----


def preflight() -> None:
    """Exit with the names of the missing packages if something that sections import is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[<>=~!]", line)[0] for line in project["dependencies"]]
    names += ["pytest", "hypothesis"]
    modules = [MODULES.get(name, name) for name in names]
    errors = [error for error in map(_import_error, modules) if error]
    if errors:
        sys.exit(
            f"this Python cannot run the book: {'; '.join(errors)}.\n"
            f"Not installed: {' '.join(_missing(names)) or 'nothing'}. `scripts/make_gpu_wheels.sh "
            "FOLDER NAME ...` makes a folder of wheels for WHEELS=FOLDER, see docs/gpu.md"
        )


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"import {module}: {error}"
    return ""


def _missing(names: list[str]) -> list[str]:
    """Names of the packages in `names`, and of those that they need, without metadata here."""
    from packaging.requirements import Requirement  # pytest brings it

    seen, missing = set(names), []
    for name in (names := [*names]):  # grows below
        try:
            needed = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        for package in needed:
            if package.name not in seen and (
                package.marker is None or package.marker.evaluate({"extra": ""})
            ):
                seen.add(package.name)
                names.append(package.name)
    return missing


# ---- one section ----


def run_section(section: Section, out: Path, limit: float, command: list[str]) -> Entry:
    """Run it in a process group of its own, which ends with it; its output goes to book.log."""
    entry = Entry(section.name, "ok", command=" ".join(["python", *command]))
    if limit <= 0:
        entry.outcome = "out of time"
        return entry
    started = time.monotonic()
    with open(out / "book.log", "a") as log:
        log.write(f"==== {entry.command}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # A thread reads, as a silent process must not outlive its limit either.
        last_line = ["no output"]
        arguments = (process, log, entry, last_line)
        reader = threading.Thread(target=_read, args=arguments, daemon=True)
        reader.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            entry.outcome = "out of time"
            process.send_signal(signal.SIGINT)  # pytest then says what has failed so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
        _kill_group(process)
        reader.join(SECONDS_TO_END)
    entry.seconds = round(time.monotonic() - started, 1)
    if entry.outcome == "ok" and process.returncode != 0:
        entry.outcome = "failed"
        if not entry.failures:
            entry.failures.append(last_line[0])
    figures = out / f"{section.name}.json"
    if figures.exists():
        entry.figures = json.loads(figures.read_text())
        figures.unlink()  # the book has them
    return entry


def _read(process: subprocess.Popen, log, entry: Entry, last_line: list[str]) -> None:
    counts: Counter[str] = Counter()
    for line in process.stdout:
        log.write(line)
        log.flush()
        last_line[0] = line.strip()[:300] or last_line[0]
        match = _OUTCOME.match(line)
        if match:
            counts[match["result"] or match["result_alone"]] += 1
            entry.counts = dict(counts)
        # Of the summary at pytest's end, which has the reason.
        elif line.startswith(("FAILED ", "ERROR ")):
            entry.failures.append(line.strip()[:300])
        elif " -m pytest " not in entry.command:
            print(f"    {line.rstrip()}", flush=True)
            entry.table += [line.rstrip()] if line.startswith("|") else []


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- the book ----


def machine() -> dict[str, Any]:
    import torch

    has_gpu = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    driver = _first_line("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _first_line("git rev-parse --short HEAD"),
        "gpus": gpus if has_gpu else [],
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30)
        if has_gpu
        else 0,
        "driver": driver,
        "torch": torch.__version__,
        "varlen": varlen_heads(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
    }


def _first_line(command: str) -> str:
    """The first line that the command prints, "" where there is no such command."""
    try:
        done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def varlen_heads() -> str:
    """Say whether torch's kernel takes grouped heads; if not, "varlen" copies k and v."""
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return "takes grouped heads" if takes_groups else "repeats heads"


def write_book(out: Path, described: dict[str, Any], entries: list[Entry]) -> None:
    book = {"machine": described, "sections": [dataclasses.asdict(entry) for entry in entries]}
    (out / "book.json").write_text(json.dumps(book, indent=2) + "\n")
    (out / "book.md").write_text(as_markdown(described, entries))


def as_markdown(described: dict[str, Any], entries: list[Entry]) -> str:
    gpus = ", ".join(f"{n} x {name}" for name, n in Counter(described["gpus"]).items()) or "no GPU"
    lines = [
        f"## {described['date']}: {gpus}",
        "",
        f"torch {described['torch']}, driver {described['driver'] or '-'}, Python "
        f"{described['python']}, {described['cpu_cores']} cores, commit "
        f"{described['commit'] or '-'}; varlen {described['varlen']}.",
        "",
        "| section | outcome | seconds | what |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        what = ", ".join(f"{n} {name.lower()}" for name, n in entry.counts.items())
        what = what or (f"{len(entry.failures)} failures" if entry.failures else "")
        lines.append(f"| {entry.section} | {entry.outcome} | {entry.seconds:.0f} | {what} |")
    for entry in entries:
        if entry.table:
            lines += ["", f"`{entry.command}`", "", *entry.table]
    for entry in entries:
        if entry.failures:
            lines += ["", f"Failures of {entry.section}:", ""]
            lines += [f"- `{failure.replace('`', '')}`" for failure in entry.failures]
    return "\n".join(lines) + "\n"


def main() -> None:
    started = time.monotonic()
    preflight()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--full", action="store_true", help="everything: about an hour")
    parser.add_argument("--dry-run", action="store_true", help="in small, also without a GPU")
    parser.add_argument("--only", nargs="+", metavar="SECTION")
    args = parser.parse_args()
    out = args.out.resolve()
    chosen = [x for x in sections(out) if not args.only or x.name in args.only]
    if args.only and len(chosen) < len(args.only):
        parser.error(f"--only takes {', '.join(x.name for x in sections(out))}, got {args.only}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "book.log").unlink(missing_ok=True)

    described = machine()
    print(json.dumps(described, indent=2), flush=True)
    entries: list[Entry] = []
    for section in chosen:
        command, left = section.command, QUICK_SECONDS - (time.monotonic() - started)
        limit = min(section.seconds or left, left - SECONDS_TO_END)
        if args.full:
            command, limit = section.full_command or command, 3600.0
        if args.dry_run:
            command, limit = [*command, *(section.dry or [])], 300.0
        if section.dry is None if args.dry_run else not described["gpus"]:
            entries.append(Entry(section.name, "not run" if args.dry_run else "no GPU"))
        else:
            print(f"{section.name} ...", flush=True)
            entries.append(run_section(section, out, limit, command))
        entry = entries[-1]
        print(f"{section.name}: {entry.outcome}, {entry.seconds:.0f} s, {entry.counts}", flush=True)
        for failure in entry.failures:
            print(f"    {failure}", flush=True)
        write_book(out, described, entries)
    print(f"{time.monotonic() - started:.0f} s in all; see {out / 'book.md'}", flush=True)
    sys.exit(any(entry.outcome in ("failed", "out of time") for entry in entries))


if __name__ == "__main__":
    main()
