"""Settings that engines change in their process, and the process's age and memory.

A process may hold several engines, closed in any order. When the last engine is closed, every
setting gets its earlier value back, unless other code has changed the setting since. Changes made
while there is no engine are permanent.
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

# ---- settings ----

_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
# When the last engine is closed, these calls run, then settings are restored; both in reverse order.
_at_close_calls = contextlib.ExitStack()
_changes = contextlib.ExitStack()


def move_in(engine: object) -> None:
    """Register an engine: until `move_out(engine)`, changes are temporary."""
    _engines.add(engine)


def move_out(engine: object) -> None:
    """Unregister an engine; the last one restores all changed settings. Idempotent."""
    if engine in _engines:
        _engines.discard(engine)
        if not _engines:
            _at_close_calls.close()
            _changes.close()


def engines() -> list[Any]:
    return list(_engines)


def at_last_move_out(at_close: Callable[[], None]) -> None:
    """Call `at_close` when the last engine is closed; never, if there is no engine now."""
    if _engines:
        _at_close_calls.callback(at_close)


def change(
    value: Any,
    write: Callable[[Any], None],
    read: Callable[[], Any] | None = None,
    before: Any = None,
) -> None:
    """Change a setting to `value` until the last engine is closed.

    read: returns the current value. None: the setting cannot be read, and is restored to `before`.
    """
    if read is not None:
        before = read()

    def restore() -> None:
        if read is None or read() == value:
            write(before)

    if _engines:
        _changes.callback(restore)
    write(value)


def change_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, class or config until the last engine is closed."""
    change(value, lambda value: setattr(owner, name, value), lambda: getattr(owner, name))


def change_environment(name: str, value: str) -> None:
    """Set an environment variable until the last engine is closed."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    change(value, write, lambda: os.environ.get(name))


# ---- the process and its machine ----


def signal_at_parents_death(number: int, *, whole_group: bool = False) -> None:
    """Send signal `number` to this process, or to its process group, once the parent has ended.

    Polls, because Linux's PR_SET_PDEATHSIG may send the signal when only one thread of the parent ends.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(0 if whole_group else os.getpid(), number)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def has_peers() -> bool:
    """Return True if the environment (RANK, WORLD_SIZE) describes a job of several ranks."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1


def total_ram_bytes() -> int:
    """Return this machine's RAM; 0 if the system doesn't report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident memory as (now, peak); without /proc, (peak, peak)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is in bytes on macOS, and in KiB elsewhere.
    if sys.platform != "darwin":
        peak *= 1024
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        now = peak
    return now, max(now, peak)


def seconds_since_start() -> float:
    """Return the age of this process; 0 if it is unknown."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def keep_freed_memory() -> None:
    """Let glibc keep up to 512 MiB of freed memory for the next tensors; saves 2 to 4 % of a CPU step.

    Has no effect with another C library, or if the environment sets malloc's thresholds.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "") + " ".join(os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "_threshold" not in chosen and "MALLOC_" not in chosen:
        # Numbers of mallopt's parameters in malloc.h.
        trim_threshold, mmap_threshold = -1, -3
        # 32 MiB is the largest threshold that glibc accepts.
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 512 << 20)


def return_freed_memory() -> None:
    """Give freed memory that glibc has kept back to the operating system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
