"""The book of what a GPU shows: sections that pass, fail and hang, and a machine without one."""

import json
import os
import time

import pytest

from benchmarks import gpu_book
from benchmarks.gpu_book import Section, run_section, write_book

pytestmark = pytest.mark.long

PYTEST_OUTPUT = """\
tests/gpu/test_a.py::test_one PASSED                                     [ 10%]
tests/gpu/test_a.py::test_two[a b] FAILED                                [ 20%]
[gw3] [ 30%] SKIPPED tests/unit/test_b.py::test_three
FAILED tests/gpu/test_a.py::test_two[a b] - AssertionError: 1 != 2
"""


def test_section_counts_outcomes_and_keeps_reasons_and_figures(tmp_path):
    code = (
        "import pathlib, sys; "
        f"print({PYTEST_OUTPUT!r}); pathlib.Path(sys.argv[1]).write_text('[1.5]'); sys.exit(1)"
    )
    entry = run_section(
        Section("tests", ["-c", code, "{out}/figures.json"], 60, 60, "figures.json"),
        tmp_path,
        full=False,
    )
    assert entry.outcome == "failed" and entry.figures == [1.5]
    assert entry.counts == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}
    assert entry.failures == ["FAILED tests/gpu/test_a.py::test_two[a b] - AssertionError: 1 != 2"]
    assert "test_three" in (tmp_path / "book.log").read_text()


def test_section_without_end_is_stopped_with_its_children_and_the_rest_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_book, "SECONDS_TO_END", 0.5)
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, "
        "flush=True); time.sleep(600)"
    )
    hung = run_section(Section("hung", ["-c", code], 2, 2), tmp_path, full=False)
    assert hung.outcome == "out of time" and hung.seconds < 30
    child = int((tmp_path / "book.log").read_text().splitlines()[-1])
    deadline = time.monotonic() + 10
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)
    crashed = run_section(Section("crashed", ["-c", "1 / 0"], 60, 60), tmp_path, full=False)
    assert crashed.failures == ["ZeroDivisionError: division by zero"]
    described = {"date": "today", "gpus": ["H100", "H100"], "torch": "2", "driver": ""}
    described |= {"python": "3", "cpu_cores": 1, "commit": "", "varlen": ""}
    write_book(tmp_path, described, [hung, crashed])
    table = (tmp_path / "book.md").read_text()
    assert "## today: 2 x H100" in table and "| hung | out of time |" in table
    assert "- `ZeroDivisionError: division by zero`" in table
    assert len(json.loads((tmp_path / "book.json").read_text())["sections"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["book.json", "book.log", "book.md"]


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
