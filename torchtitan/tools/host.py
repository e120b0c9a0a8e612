"""Settings of the process that engines live in: changed on loan, and given back.

A process may hold several engines, closed in any order. When the last one is closed, every setting
goes back to what it was, unless somebody else has changed it meanwhile. Changes that are made while
there is no engine stay.
"""

import contextlib
import ctypes
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
# What the last engine undoes, the latest first: calls before changes.
_at_close_calls = contextlib.ExitStack()
_changes = contextlib.ExitStack()


def move_in(engine: Any) -> None:
    """Changes are on loan from here on, until `move_out(engine)`."""
    _engines.add(engine)


def move_out(engine: Any) -> None:
    """If this is the last engine, put back what was changed. May be called twice."""
    if engine in _engines:
        _engines.discard(engine)
        if not _engines:
            _at_close_calls.close()
            _changes.close()


def engines() -> list[Any]:
    """The engines of this process."""
    return list(_engines)


def at_last_move_out(at_close: Callable[[], None]) -> None:
    """Call `at_close` when the last engine is closed; never, if there is none now."""
    if _engines:
        _at_close_calls.callback(at_close)


def change(
    value: Any,
    write: Callable[[Any], None],
    read: Callable[[], Any] | None = None,
    before: Any = None,
) -> None:
    """Change a setting to `value`, on loan.

    read: None for a setting that cannot be read; it then goes back to `before`.
    """
    if read is not None:
        before = read()

    def take_back() -> None:
        if read is None or read() == value:
            write(before)

    if _engines:
        _changes.callback(take_back)
    write(value)


def change_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, class or config, on loan."""
    change(value, lambda value: setattr(owner, name, value), lambda: getattr(owner, name))


def change_environment(name: str, value: str) -> None:
    """Set an environment variable, on loan."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    change(value, write, lambda: os.environ.get(name))


def signal_at_parents_death(number: int, *, whole_group: bool = False) -> None:
    """Get this signal within a second after the parent process is gone.

    whole_group: all processes of this one's group get it.

    Linux could send it (PR_SET_PDEATHSIG), but does so once for each thread of the parent, and a
    second signal ends a run that is being saved.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(0 if whole_group else os.getpid(), number)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def has_peers() -> bool:
    """Whether the environment describes this rank and others."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1


def total_ram_bytes() -> int:
    """This machine's RAM; 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def resident_bytes() -> tuple[int, int]:
    """This process's resident memory: now, and at its peak; the peak twice without /proc."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # there it is bytes, elsewhere KiB
        peak *= 1024
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        now = peak
    return now, max(now, peak)


def seconds_since_start() -> float:
    """The age of this process; 0 where that is not known."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def keep_freed_memory() -> None:
    """Have glibc keep up to 512 MiB of freed memory for the next tensors, for good.

    By default it returns much of it to the system, and a step on the CPU then spends 2 to 4 % on
    page faults. Thresholds in the environment stay; so does what other C libraries do.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "") + " ".join(os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "_threshold" not in chosen and "MALLOC_" not in chosen:
        trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc takes
        mallopt(trim_threshold, 512 << 20)
