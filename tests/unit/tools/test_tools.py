import gc
import json
import logging
import pickle
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from torchtitan.callbacks import profiling
from torchtitan.config import Profiling
from torchtitan.tools import host, torch_versions, utils
from torchtitan.tools.logging import init_logger, logger


def test_init_logger_prints_each_record_once_with_the_titan_mark(capsys):
    root_handlers = list(logging.getLogger().handlers)
    init_logger()
    init_logger()
    logger.info("hello")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and re.fullmatch(r"\[titan\] \d\d:\d\d:\d\d hello", lines[0])
    assert logging.getLogger().handlers == root_handlers


@pytest.mark.parametrize(
    "rank, log_rank, expected",
    [
        ("0", None, ["hello", "WARNING: hot"]),
        ("3", None, ["[rank 3] WARNING: hot"]),
        ("3", "0,3", ["[rank 3] hello", "[rank 3] WARNING: hot"]),
        ("3", "all", ["[rank 3] hello", "[rank 3] WARNING: hot"]),
    ],
)
def test_other_ranks_print_warnings_only_and_their_number(
    monkeypatch, capsys, rank, log_rank, expected
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOG_RANK", raising=False)
    if log_rank is not None:
        monkeypatch.setenv("LOG_RANK", log_rank)
    init_logger()
    logger.info("hello")
    logger.warning("hot")
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == expected


def test_device_is_asked_for_at_use_and_can_be_pinned(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert utils.device_type is None
    assert utils.get_device_info() == ("cpu", torch.cpu)
    assert utils.device_module is torch.cpu
    monkeypatch.setattr(utils, "device_type", "cuda")
    assert utils.get_device_info() == ("cuda", torch.cuda)
    assert utils.get_device_type() == "cuda"


def test_peak_flops_come_from_the_data_sheet_or_not_at_all():
    peaks = {
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H20": 148e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA GB200": 2.5e15,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "AMD Instinct MI325X OAM": 1300e12,
        "x86_64": None,
    }
    assert {name: utils.get_peak_flops(name) for name in peaks} == peaks


def test_garbage_collection_is_off_until_closed():
    handler = utils.GarbageCollection(gc_freq=2)
    assert not gc.isenabled()
    handler.close()
    handler.close()
    assert gc.isenabled()


@pytest.mark.parametrize(
    "debug, at, generation", [(False, [2, 4, 6], 1), (True, [1, 2, 3, 4, 5, 6], 2)]
)
def test_garbage_is_collected_every_gc_freq_steps_or_each_step(monkeypatch, debug, at, generation):
    handler, found = utils.GarbageCollection(gc_freq=2, debug=debug), []
    monkeypatch.setattr(gc, "collect", lambda generation: found.append((step, generation)))
    for step in range(1, 7):
        handler.run(step)
    assert found == [(step, generation) for step in at]
    handler.close()


@pytest.mark.parametrize(
    "version, newer",
    [("2.15.9", False), ("2.15.0+cpu", False), ("2.16.0.dev20270101", True), ("3.0.0", True)],
)
def test_torch_newer_than_the_tested_ones_is_named_once_on_one_rank(
    caplog, monkeypatch, version, newer
):
    monkeypatch.setattr(torch_versions, "TESTED", {"2.9.0": "", "2.15.0": ""})
    line = f"torch {version} is newer than 2.15, the newest that torchtitan was tested with"
    monkeypatch.setenv("RANK", "1")
    torch_versions.warn_if_newer(version)
    assert not caplog.messages
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        torch_versions.warn_if_newer(version)
    assert caplog.messages == newer * [line]


# --- profiling ----------------------------------------------------------------------------


def test_profiler_writes_one_trace_per_cycle_counting_from_global_step(tmp_path):
    config = Profiling(enable_profiling=True, profile_freq=3, profiler_active=1, profiler_warmup=1)
    with profiling.maybe_enable_profiling(
        config, global_step=6, base_folder=str(tmp_path), leaf_folder="leaf"
    ) as profiler:
        for _ in range(7):
            torch.ones(4).sum()
            profiler.step()
    traces = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.json"))
    assert traces == [
        "profile_traces/iteration_12/leaf/rank0_trace.json",
        "profile_traces/iteration_9/leaf/rank0_trace.json",
    ]
    assert json.loads((tmp_path / traces[0]).read_text())["traceEvents"]


def test_memory_snapshots_are_written_each_cycle_and_when_memory_runs_out(tmp_path, monkeypatch):
    recording = []
    memory = SimpleNamespace(  # for torch.cuda.memory
        _record_memory_history=lambda **options: recording.append(options),
        _snapshot=lambda: {"segments": []},
    )
    device = SimpleNamespace(memory=memory)
    monkeypatch.setattr(profiling, "get_device_info", lambda: ("cuda", device))
    config = Profiling(enable_memory_snapshot=True, profile_freq=2)
    with pytest.raises(torch.OutOfMemoryError):
        with profiling.maybe_enable_memory_snapshot(
            config, global_step=4, base_folder=str(tmp_path)
        ) as snapshot:
            for _ in range(3):
                snapshot.step()
            raise torch.OutOfMemoryError
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.pickle"))
    assert written == [
        "memory_snapshot/iteration_6/rank0_memory_snapshot.pickle",
        "memory_snapshot/iteration_7_exit/rank0_memory_snapshot.pickle",
    ]
    assert pickle.loads((tmp_path / written[0]).read_bytes()) == {"segments": []}
    most = profiling.MEMORY_SNAPSHOT_MAX_ENTRIES
    assert recording == [{"max_entries": most}, {"enabled": None}]


def test_freed_memory_is_returned_with_every_twentieth_collection(monkeypatch):
    handler = utils.GarbageCollection(gc_freq=2)
    returned = []
    monkeypatch.setattr(host, "return_freed_memory", lambda: returned.append(step))
    for step in range(1, 100):
        handler.run(step)
    handler.close()
    assert returned == [40, 80]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a call of glibc's malloc")
def test_returned_memory_is_not_resident_any_more():
    code = """if True:
        from torchtitan.tools import host
        host.keep_freed_memory()
        blocks = [bytearray(1 << 20) for _ in range(64)]
        del blocks[:-1]  # the last keeps the heap from shrinking by itself
        kept, _ = host.resident_bytes()
        host.return_freed_memory()
        print(kept - host.resident_bytes()[0])
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 50 << 20
