"""Runs all that only a GPU can show, section by section; scripts/run_gpu_book.sh calls it.

    python benchmarks/gpu_book.py OUT [--full] [--only tests throughput]

Each section is a command with a time limit, and the next one runs whatever came of it. OUT gets
book.json, book.md and book.log, the output of all sections; both books are written again after
every section, so that a run cut short has told what it found.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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


@dataclasses.dataclass(frozen=True)
class Section:
    """command: without the interpreter; "{out}" is the folder of the book. json: a file there
    that the command writes. seconds: its limit, None for what is left of QUICK_SECONDS;
    full_seconds: its limit with --full."""

    name: str
    command: list[str]
    seconds: float | None
    full_seconds: float
    json: str | None = None
    full_command: list[str] | None = None


@dataclasses.dataclass
class Entry:
    """What came of a section. outcome: ok, failed, out of time, or no GPU."""

    section: str
    outcome: str
    seconds: float = 0.0
    command: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    figures: Any = None


def pytest_command(*arguments: str, processes: int, dist: str = "loadfile") -> list[str]:
    """On several processes, which share the card, if pytest-xdist is there."""
    command = ["-m", "pytest", "-v", "--color=no", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(processes, os.cpu_count() or 1)), f"--dist={dist}"]
    return [*command, *arguments]


def sections() -> list[Section]:
    """In the order of what is most wanted, should time run out; `tests` gets what is left."""
    from tests.conftest import ON_THE_DEVICE  # imports what `preflight` looks for

    throughput = ["benchmarks/throughput.py", "--json", "{out}/throughput.json"]
    untuned = ("-p", "tests.gpu.untuned")
    return [
        Section(
            "throughput",
            [*throughput, "--attn-types", "flex", "--blocks", "3"],
            110,
            1200,
            json="throughput.json",
            full_command=throughput,
        ),
        Section(
            "throughput_autocast",
            [
                *("benchmarks/throughput.py", "--json", "{out}/throughput_autocast.json"),
                *("--models", "1B", "--attn-types", "flex", "--blocks", "3"),
                *("--override", "parallelism.always_fsdp=False"),
            ],
            60,
            600,
            json="throughput_autocast.json",
        ),
        Section(
            "attention",
            ["benchmarks/attention.py", "--json", "{out}/attention.json"],
            50,
            600,
            json="attention.json",
        ),
        Section(
            "waits",
            ["benchmarks/device_waits.py", "--json", "{out}/waits.json"],
            80,
            600,
            json="waits.json",
        ),
        Section(
            "unit",
            pytest_command(
                *untuned, *(path for path in ON_THE_DEVICE if path != "tests/gpu/"), processes=14
            ),
            90,
            3600,
            full_command=pytest_command(
                *("tests/unit", "tests/compat", "tests/reference", "tests/distributed"),
                processes=4,
            ),
        ),
        # Most of their time is the compiler's, on the CPU.
        Section(
            "tests",
            pytest_command(*untuned, "tests/gpu", processes=14, dist="load"),
            None,
            1800,
            full_command=pytest_command("tests/gpu", processes=8, dist="load"),
        ),
    ]


# ---- before the first section ----


def preflight() -> None:
    """Exit with the names of the missing packages if something that sections import is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[<>=~!]", line)[0] for line in project["dependencies"]]
    names += ["pytest", "hypothesis"]
    errors = [error for error in map(_import_error, names) if error]
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


def run_section(
    section: Section, out: Path, full: bool, seconds_left: float = float("inf")
) -> Entry:
    """Run it in a process group of its own, which ends with it; its output goes to book.log."""
    command = section.full_command or section.command if full else section.command
    command = [part.replace("{out}", str(out)) for part in command]
    limit = section.full_seconds
    if not full:
        limit = min(section.seconds or seconds_left, seconds_left - SECONDS_TO_END)
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
    if section.json is not None and (out / section.json).exists():
        entry.figures = json.loads((out / section.json).read_text())
        (out / section.json).unlink()  # the book has them
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
    """ "repeated heads" where torch's kernel takes no grouped heads, and "varlen" copies k and v."""
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return "" if takes_groups else "repeated heads"


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
        f"{described['commit'] or '-'}.",
        "",
        "| section | outcome | seconds | what |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        what = ", ".join(f"{n} {name.lower()}" for name, n in entry.counts.items())
        what = what or (f"{len(entry.failures)} failures" if entry.failures else "")
        lines.append(f"| {entry.section} | {entry.outcome} | {entry.seconds:.0f} | {what} |")
    for entry in entries:
        if entry.section.startswith("throughput") and entry.figures:
            table = _throughput_table(entry.figures, described["varlen"])
            lines += ["", f"`{entry.command}`", "", *table]
        elif entry.section == "attention" and entry.figures:
            lines += ["", *_attention_table(entry.figures, described["varlen"])]
        elif entry.section == "waits" and entry.figures:
            lines += ["", *_waits_table(entry.figures)]
    for entry in entries:
        if entry.failures:
            lines += ["", f"Failures of {entry.section}:", ""]
            lines += [f"- `{failure.replace('`', '')}`" for failure in entry.failures]
    return "\n".join(lines) + "\n"


def _throughput_table(figures: list[dict[str, Any]], varlen: str) -> list[str]:
    lines = [
        "| model | kernel | rows x T | tokens/s | MFU | as logged | of matmuls | memory | host "
        "| recompiled | waits per step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in figures:
        kernel = _marked(one["attn_type"], varlen)
        name = f"| {one['model']} | {kernel} | {one['rows']} x {one['seq_len']} |"
        if one["error"]:
            lines.append(f"{name} {one['error'].replace('|', '/')} |" + " |" * 7)
            continue
        lines.append(
            f"{name} {one['tokens_per_second']:,.0f} | {_percent(one['mfu'])} | "
            f"{_percent(one['mfu_as_logged'])} | {_percent(one['share_of_matmul_rate'])} | "
            f"{one['peak_memory_gib']:.1f} GiB | {_percent(one['host_share'])} | "
            f"{one['recompilations']} | {sum(one['waits_per_step'].values()):g} |"
        )
    return lines


def _marked(kernel: str, varlen: str) -> str:
    return f"{kernel}, {varlen}" if kernel == "varlen" and varlen else kernel


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _attention_table(figures: list[dict[str, Any]], varlen: str) -> list[str]:
    lines = ["| attention | T | ms, forward and backward |", "|---|---|---|"]
    for one in figures:
        for kernel, milliseconds in one.get("milliseconds", {}).items():
            name = _marked(kernel, varlen)
            lines.append(f"| {name} | {one['seq_len']} | {milliseconds:.2f} |")
    for one in figures:
        for kernel, stalls in one.items():
            if isinstance(stalls, dict) and "recompilations" in stalls:
                lines.append(
                    f"| {kernel}, 10 other layouts | | {stalls['recompilations']} recompiled, "
                    f"{sum(stalls['waits'].values())} waits |"
                )
    return lines


def _waits_table(figures: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | waits of a step | not allowed |", "|---|---|---|"]
    for one in figures:
        seen = "<br>".join(f"{n} x {place}" for place, n in one["waits"].items()) or "none"
        new = "<br>".join(one["unexpected"]) or "none"
        lines.append(f"| {one['case']} | {one['error'] or seen} | {new} |")
    return lines


def main() -> None:
    started = time.monotonic()
    preflight()
    names = [section.name for section in sections()]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--full", action="store_true", help="everything: about an hour")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "book.log").unlink(missing_ok=True)

    described = machine()
    print(json.dumps(described, indent=2), flush=True)
    entries: list[Entry] = []
    for section in sections():
        if section.name not in args.only:
            continue
        if not described["gpus"]:
            entries.append(Entry(section.name, "no GPU"))
        else:
            print(f"{section.name} ...", flush=True)
            seconds_left = QUICK_SECONDS - (time.monotonic() - started)
            entries.append(run_section(section, out, args.full, seconds_left))
        entry = entries[-1]
        print(f"{section.name}: {entry.outcome}, {entry.seconds:.0f} s, {entry.counts}", flush=True)
        for failure in entry.failures:
            print(f"    {failure}", flush=True)
        write_book(out, described, entries)
    print(f"{time.monotonic() - started:.0f} s in all; see {out / 'book.md'}", flush=True)
    sys.exit(any(entry.outcome in ("failed", "out of time") for entry in entries))


if __name__ == "__main__":
    main()
