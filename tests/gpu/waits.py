"""Where the host waits for the device, as CUDA reports it; for tests and benchmarks."""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PROJECT = str(Path(__file__).resolve().parents[2])


@contextmanager
def counting_waits() -> Iterator[Counter[str]]:
    """Counts inside, by "file function" of the project, what made the host wait.

    CUDA's debug mode misses explicit synchronisation and events, and copies from pageable memory
    that were asked not to block. Without CUDA nothing is counted.
    """
    waits: Counter[str] = Counter()

    def note(message: Warning | str, *_args: object) -> None:
        # The mode also says once that it is a prototype, in words that are much the same.
        if "called a synchronizing" in str(message):
            waits[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _report_waits("warn")
        try:
            yield waits
        finally:
            _report_waits("default")


def _report_waits(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def _place() -> str:
    """The innermost frame in the project's files, except in this one."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        # An environment may lie inside the checkout.
        if file.startswith(PROJECT) and "site-packages" not in file and file != __file__:
            name = file.removeprefix(PROJECT + "/").removeprefix("torchtitan/")
            return f"{name} {frame.f_code.co_name}"
        frame = frame.f_back
    return "in torch"


def num_graphs() -> int:
    """Graphs that the compiler has made in this process: more of them later are recompilations."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
