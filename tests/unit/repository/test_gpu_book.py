"""The book of what a GPU shows: sections that pass, fail and hang, and a machine without one."""

import json
import os
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

from benchmarks import attention, device_waits, gpu_book
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


def test_figures_become_tables():
    figures = {
        "throughput": [
            dict(
                model="1B",
                attn_type="flex",
                rows=1,
                seq_len=16384,
                tokens_per_second=5e4,
                mfu=0.456,
                mfu_as_logged=None,
                share_of_matmul_rate=0.6,
                peak_memory_gib=60.0,
                host_share=0.2,
                recompilations=0,
                waits_per_step={"engine.py f": 1.0},
                error="",
            ),  # fmt: skip
            dict(model="1B", attn_type="flex", rows=2, seq_len=16384, error="OutOfMemory"),
        ],
        "attention": [
            {"seq_len": 512, "milliseconds": {"flex": 1.25, "varlen": 2.5}},
            {"flex": {"recompilations": 0, "waits": {"x": 2}}},
        ],
        "waits": [dict(case="llama3", waits={"x": 3}, unexpected=["x"], error="")],
    }
    entries = [gpu_book.Entry(name, "ok", figures=value) for name, value in figures.items()]
    described = dict.fromkeys(("date", "torch", "driver", "python", "cpu_cores", "commit"), "")
    described |= {"gpus": [], "varlen": "repeated heads"}
    table = gpu_book.as_markdown(described, entries)
    assert "| 50,000 | 45.6 % | - | 60.0 % | 60.0 GiB | 20.0 % | 0 | 1 |" in table
    assert "| 2 x 16384 | OutOfMemory |" in table and "| flex | 512 | 1.25 |" in table
    assert "| varlen, repeated heads | 512 | 2.50 |" in table
    assert "| llama3 | 3 x x | x |" in table


def test_commands_of_all_sections_exist_and_leave_time_for_the_tests():
    sections = gpu_book.sections()
    for section in sections:
        for command in filter(None, (section.command, section.full_command)):
            paths = [part for part in command if part.startswith(("tests/", "benchmarks/"))]
            assert paths and all((gpu_book.ROOT / path).exists() for path in paths)
    assert sections[0].name == "throughput" and sections[-1].seconds is None
    limits = [section.seconds + gpu_book.SECONDS_TO_END for section in sections[:-1]]
    assert sum(limits) + 90 <= gpu_book.QUICK_SECONDS < 540
    throughput, autocast = sections[:2]
    assert "parallelism.always_fsdp=False" in autocast.command  # True is the default on a GPU
    assert "--override" not in throughput.command


def test_section_without_a_limit_gets_the_time_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_book, "SECONDS_TO_END", 0.5)
    section = Section("tests", ["-c", "import time; time.sleep(600)"], None, 60)
    entry = run_section(section, tmp_path, full=False, seconds_left=1.5)
    assert entry.outcome == "out of time" and 1.0 <= entry.seconds < 5.0
    entry = run_section(section, tmp_path, full=False, seconds_left=0.2)
    assert entry.outcome == "out of time" and entry.seconds == 0


def test_missing_packages_are_named_with_those_they_need(tmp_path, monkeypatch):
    for name, needs in {"present": "absent", "dependency": "deep; python_version > '3'"}.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
        metadata += "Requires-Dist: unwanted; extra == 'all'\nRequires-Dist: dependency\n"
        (folder / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert gpu_book._missing(["present"]) == ["absent", "deep"]
    monkeypatch.setattr(gpu_book, "_import_error", lambda name: "x" if name == "datasets" else "")
    monkeypatch.setattr(gpu_book, "_missing", lambda names: ["dill", "multiprocess"])
    with pytest.raises(SystemExit, match="x.*\nNot installed: dill multiprocess.*make_gpu_wheels"):
        gpu_book.preflight()


def test_machine_without_git_has_a_book(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpu_book.machine()["commit"] == gpu_book.machine()["driver"] == ""


def test_untuned_kernels_are_compiled_without_autotuning():
    """In a process of its own, because the plug-in replaces `torch.compile`."""
    code = (
        "import torch; torch.compile = lambda *args, **kwargs: kwargs\n"
        "from tests.gpu import untuned\n"
        "print(untuned.compile_untuned(len, options={'max_autotune': True, 'triton.cudagraphs': 0}))\n"
        "print(untuned.compile_untuned(len, mode='max-autotune-no-cudagraphs', dynamic=True))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=gpu_book.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "{'mode': None, 'options': {'triton.cudagraphs': 0}}",
        "{'mode': None, 'options': None, 'dynamic': True}",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_command_says_no_gpu_and_succeeds_where_there_is_none(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "VENV": "none"}
    command = ["scripts/run_gpu_book.sh", str(tmp_path / "out"), "--only", "tests", "unit"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    book = json.loads((tmp_path / "out" / "book.json").read_text())
    assert [entry["outcome"] for entry in book["sections"]] == ["no GPU", "no GPU"]


def test_attention_benchmark_cut_short_has_written_what_it_measured(tmp_path, monkeypatch):
    figures = tmp_path / "attention.json"
    compare = mock.Mock(side_effect=[{"seq_len": 8192}, KeyboardInterrupt])
    monkeypatch.setattr(attention, "compare_kernels", compare)
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(sys, "argv", ["attention.py", "--json", str(figures)])
    with pytest.raises(KeyboardInterrupt):
        attention.main()
    assert json.loads(figures.read_text()) == [{"seq_len": 8192}]


def test_waits_are_counted_with_the_kernels_of_a_gpu():
    flags = device_waits.flags_of("gpt_oss compile")
    assert "--compile.enable" in flags and not any("aot_eager" in flag for flag in flags)
