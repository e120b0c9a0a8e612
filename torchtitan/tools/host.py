"""Settings of the process that engines live in: changed on loan, and given back.

A process may hold several engines, closed in any order. When the last one is closed, every setting
goes back to what it was, unless somebody else has changed it meanwhile. Changes that are made while
there is no engine stay.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Change:
    write: Callable[[Any], None]
    read: Callable[[], Any] | None
    before: Any
    ours: Any


_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
_changes: dict[Any, _Change] = {}
_at_close_calls: list[Callable[[], None]] = []


def move_in(engine: Any) -> None:
    """Changes are on loan from here on, until `move_out(engine)`."""
    _engines.add(engine)


def move_out(engine: Any) -> None:
    """If this is the last engine, put back what was changed. May be called twice."""
    if engine not in _engines:
        return
    _engines.discard(engine)
    if _engines:
        return
    changes, at_close_calls = list(_changes.values()), list(_at_close_calls)
    _changes.clear()
    _at_close_calls.clear()
    for at_close in reversed(at_close_calls):
        at_close()
    for change in reversed(changes):
        if change.read is None or change.read() == change.ours:
            change.write(change.before)


def engines() -> list[Any]:
    """The engines of this process."""
    return list(_engines)


def at_last_move_out(at_close: Callable[[], None]) -> None:
    """Call `at_close` when the last engine is closed; never, if there is none now."""
    if _engines:
        _at_close_calls.append(at_close)


def change(
    key: Any,
    value: Any,
    write: Callable[[Any], None],
    read: Callable[[], Any] | None = None,
    before: Any = None,
) -> None:
    """Set what `key` stands for to `value`, on loan.

    read: None for a setting that cannot be read; it then goes back to `before`.
    """
    if key in _changes:
        _changes[key].ours = value
    elif _engines:
        _changes[key] = _Change(write, read, before if read is None else read(), value)
    write(value)


def change_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, class or config, on loan."""
    change(
        (id(owner), name),
        value,
        read=lambda: getattr(owner, name),
        write=lambda value: setattr(owner, name, value),
    )


def change_environment(name: str, value: str) -> None:
    """Set an environment variable, on loan."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    change(("environment", name), value, read=lambda: os.environ.get(name), write=write)


def signal_at_parents_death(number: int) -> None:
    """Get this signal within a second after the parent process is gone.

    Linux could send it (PR_SET_PDEATHSIG), but does so once for each thread of the parent, and a
    second signal ends a run that is being saved.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), number)

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
