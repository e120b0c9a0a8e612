"""Profiler traces and memory snapshots, written every few steps."""

import os
import pickle
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.config import Profiling
from torchtitan.config.checks.common import refuse
from torchtitan.config.checks.values import profiling_cycle
from torchtitan.tools import torch_parts
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import _rank, get_device_info

MEMORY_SNAPSHOT_MAX_ENTRIES = 100000


@contextmanager
def maybe_enable_profiling(
    profiling_config: Profiling,
    *,
    global_step: int = 0,
    base_folder: str = "",
    leaf_folder: str = "",
) -> Generator[torch.profiler.profile | None, None, None]:
    """Yield a profiler, whose `step()` is called once per training step; None if profiling is off."""
    if not profiling_config.enable_profiling:
        yield None
        return
    refuse(profiling_cycle(profiling_config))
    active, warmup = profiling_config.profiler_active, profiling_config.profiler_warmup
    wait = profiling_config.profile_freq - active - warmup
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    elif torch.xpu.is_available():
        activities.append(torch.profiler.ProfilerActivity.XPU)
    traces_folder = os.path.join(base_folder, profiling_config.save_traces_folder)

    def export_trace(profiler: torch.profiler.profile) -> None:
        folder = _iteration_folder(traces_folder, f"{profiler.step_num}", leaf_folder)
        start = time.monotonic()
        path = os.path.join(folder, f"rank{_rank()}_trace.json")
        profiler.export_chrome_trace(path)
        logger.info("Wrote profiler trace %s in %.2f seconds", path, time.monotonic() - start)

    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active),
        on_trace_ready=export_trace,
        record_shapes=True,
    ) as profiler:
        profiler.step_num = global_step
        logger.info("Profiling is on, traces go to %s", traces_folder)
        yield profiler


@contextmanager
def maybe_enable_memory_snapshot(
    profiling_config: Profiling,
    *,
    global_step: int = 0,
    base_folder: str = "",
    leaf_folder: str = "",
) -> Generator["MemorySnapshot | None", None, None]:
    """Yield a `MemorySnapshot`, whose `step()` is called once per training step; None if switched off."""
    if not profiling_config.enable_memory_snapshot:
        yield None
        return
    device_type, device_module = get_device_info()
    memory = getattr(device_module, "memory", None)
    record = torch_parts.field_of(memory, "record_memory")
    if record is None:
        warn_once(
            logger,
            "profiling.enable_memory_snapshot is ignored: "
            f"the {device_type} allocator keeps no history to write.",
        )
        yield None
        return

    folder = os.path.join(base_folder, profiling_config.save_memory_snapshot_folder)
    freq = profiling_config.profile_freq
    snapshot = MemorySnapshot(memory, folder, leaf_folder, freq, global_step)
    record(max_entries=MEMORY_SNAPSHOT_MAX_ENTRIES)
    logger.info("Memory history is recorded, snapshots go to %s", folder)
    try:
        yield snapshot
    except torch.OutOfMemoryError:
        snapshot.step(exit_ctx=True)
        raise
    finally:
        record(enabled=None)


@dataclass
class MemorySnapshot:
    """Writes the allocator's history every `freq` steps, for pytorch.org/memory_viz."""

    memory: Any  # a device's memory module, such as torch.cuda.memory
    folder: str
    leaf_folder: str
    freq: int
    step_num: int

    def step(self, exit_ctx: bool = False) -> None:
        """Count one step, and write a snapshot if due. exit_ctx: write now, without counting a step."""
        if not exit_ctx:
            self.step_num += 1
            if self.step_num % self.freq:
                return
        label = f"{self.step_num}_exit" if exit_ctx else f"{self.step_num}"
        folder = _iteration_folder(self.folder, label, self.leaf_folder)
        path = os.path.join(folder, f"rank{_rank()}_memory_snapshot.pickle")
        with open_file(path, "wb") as file:
            pickle.dump(torch_parts.field_of(self.memory, "memory_history")(), file)
        logger.info("Wrote memory snapshot %s", path)


def _iteration_folder(base: str, label: str, leaf: str) -> str:
    folder = os.path.join(base, f"iteration_{label}", leaf)
    os.makedirs(folder, exist_ok=True)
    return folder
