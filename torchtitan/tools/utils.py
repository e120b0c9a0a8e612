"""Small helpers: the device and its peak FLOP/s, Python's garbage collection, colours."""

import gc
import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger

T = TypeVar("T")

# Set by a test or client. None: look for a device on each use, because looking on import would start the
# CUDA driver even for a program that only needs a config.
device_type: str | None = None


def __getattr__(name: str) -> Any:
    if name == "device_module":
        return get_device_info()[1]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_device_info() -> tuple[str, ModuleType]:
    """Return the device type to train on and its torch module, e.g. ("cpu", torch.cpu)."""
    if device_type is not None:
        return device_type, torch.get_device_module(device_type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # No collective backend supports Apple's GPU, so a Mac trains on its CPU.
    if accelerator is None or accelerator.type == "mps":
        return "cpu", torch.cpu
    return accelerator.type, torch.get_device_module(accelerator.type)


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this thread; a new thread starts with device 0."""
    if device.type != "cpu":
        get_device_info()[1].set_device(device)


def get_device_type() -> str:
    """Return "cuda", "xpu", ... for the accelerator of this machine, "cpu" without one."""
    return get_device_info()[0]


def free_memory(device: torch.device) -> float:
    """Return the bytes that this process can still allocate on `device`; inf if unknown.

    On a CPU: the host's available memory divided by the number of ranks on this host.
    """
    if device.type == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return math.inf
        kib = next((int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), math.inf)
        return kib * 1024 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module = getattr(torch, device.type)
    if not hasattr(module, "mem_get_info"):
        return math.inf
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


def has_cuda_capability(major: int, minor: int) -> bool:
    """True if the current CUDA (or ROCm) device is at least of this compute capability."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (major, minor)


def has_rocm_capability(major: int, minor: int) -> bool:
    """True if this is a ROCm build of torch on a device of at least this capability."""
    return torch.version.hip is not None and has_cuda_capability(major, minor)


_PARAMETERS: MutableMapping[Any, tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def keywords_of(method: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return (names of a method's parameters, whether it has **kwargs), cached."""
    function = getattr(method, "__func__", method)
    if function not in _PARAMETERS:
        parameters = inspect.signature(method).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        _PARAMETERS[function] = frozenset(parameters), takes_any
    return _PARAMETERS[function]


class GarbageCollection:
    """Collects Python garbage on chosen steps, at the same time on every rank.

    Automatic collection is off from construction until `close()`. Every 20th collection also returns
    the C library's free memory to the system; otherwise resident memory grows for thousands of steps.
    """

    def __init__(self, gc_freq: int = 1000, debug: bool = False) -> None:
        if gc_freq <= 0:
            raise ValueError(f"training.gc_freq must be a positive number of steps, got {gc_freq}")
        self.gc_freq = gc_freq
        self.debug = debug
        self._was_enabled = gc.isenabled()
        gc.disable()
        self.collect("first collection, automatic collection is off from now on")
        self._stop_watching_cycles: Callable[[], None] | None = None
        if debug and _rank() == 0 and torch.cuda.is_available():
            self._stop_watching_cycles = torch_parts.warn_tensor_cycles()

    def run(self, step_count: int) -> None:
        """Collect every `gc_freq` steps; in debug mode, every step and all generations."""
        if self.debug:
            self.collect("every step, as training.gc_debug asks", generation=2)
        elif step_count > 1 and step_count % self.gc_freq == 0:
            self.collect("periodic")
            # Rarely, because returning memory makes the step a fifth longer.
            if step_count % (20 * self.gc_freq) == 0:
                host.return_freed_memory()

    def close(self) -> None:
        """Turn automatic collection on again if it was on before. May be called twice."""
        if self._was_enabled:
            gc.enable()
        if self._stop_watching_cycles is not None:
            self._stop_watching_cycles()
            torch_parts.record_memory(enabled=None)  # `warn_tensor_cycles` enabled the recording
            self._stop_watching_cycles = None

    @staticmethod
    def collect(reason: str, generation: int = 1) -> None:
        """Collect up to `generation` now; log the duration at INFO if it is a second or more."""
        start = time.monotonic()
        gc.collect(generation)
        seconds = time.monotonic() - start
        level = logging.INFO if seconds >= 1 else logging.DEBUG
        logger.log(level, "[GC] %s: %.2f seconds", reason, seconds)


# Dense bf16 peak in FLOP/s of one device, from vendors' data sheets. The first entry whose words all
# occur in the device's name is used, so longer names come first.
_PEAK_FLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("A100",), 312e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("H20",), 148e12),
    (("GB200",), 2.5e15),
    (("B200",), 2.25e15),
    (("GB300",), 2.5e15),
    (("B300",), 2.25e15),
    (("MI355X",), 2500e12),
    (("MI300X",), 1300e12),
    (("MI325X",), 1300e12),
    (("MI250X",), 191.5e12),
    (("l40s",), 362e12),
    (("L40S",), 362e12),
)


def get_peak_flops(device_name: str) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if unknown, because a guess would mislead."""
    if "Data Center GPU Max 1550" in device_name:
        # 512 bf16 operations per compute unit and cycle, at 1300 MHz.
        return 512 * torch.xpu.get_device_properties("xpu").max_compute_units * 1300e6
    if " MIG " in device_name:  # a MIG instance is only a part of a device
        return None
    for words, peak in _PEAK_FLOPS:
        if all(word in device_name for word in words):
            return peak
    return None


@dataclass(frozen=True)
class Color:
    """ANSI escape codes."""

    black = "\033[30m"
    red = "\033[31m"
    green = "\033[32m"
    yellow = "\033[33m"
    blue = "\033[34m"
    magenta = "\033[35m"
    cyan = "\033[36m"
    white = "\033[37m"
    reset = "\033[39m"
    orange = "\033[38;2;180;60;0m"
    turquoise = "\033[38;2;54;234;195m"


NoColor = dataclass(frozen=True)(
    type("NoColor", (), {name: "" for name in vars(Color) if not name.startswith("_")})
)
"""The names of `Color`, all empty."""


def check_if_feature_in_pytorch(
    feature_name: str, pull_request: str, min_nightly_version: str | None = None
) -> None:
    """Warn if the installed torch may lack a feature that `pull_request` added."""
    if "git" in torch.__version__:
        logger.warning(
            f"This torch was built from source: make sure that it contains {pull_request} for "
            f"{feature_name}."
        )
    elif min_nightly_version is not None and torch.__version__ < min_nightly_version:
        logger.warning(
            f"{feature_name} needs torch {min_nightly_version} or newer ({pull_request}), this is "
            f"{torch.__version__}."
        )


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def run_beside(function: Callable[[], T]) -> Future[T]:
    """Call `function` on a daemon thread; return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _round_up(x: int, y: int) -> int:
    """Return x rounded up to a multiple of y."""
    return (x + y - 1) // y * y
