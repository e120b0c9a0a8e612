"""The package's logger.

A program that embeds the engine gets the log records by propagation; only `main()` calls `init_logger`.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

logger: logging.Logger = logging.getLogger("torchtitan")

_said: ContextVar[set[Any]] = ContextVar("said", default=set())  # noqa: B039, the process's default


class _StdoutHandler(logging.StreamHandler):
    """Writes to stdout. If the reader closes the pipe (`| head`), the run continues silently."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        else:
            super().handleError(record)


class _LineFormatter(logging.Formatter):
    """Formats `[titan] 12:34:56 message`; adds the rank if it is not 0, and the level from WARNING up."""

    def __init__(self, rank: str) -> None:
        super().__init__()
        self._rank = "" if rank == "0" else f"[rank {rank}] "

    def format(self, record: logging.LogRecord) -> str:
        mark = self._rank + (f"{record.levelname}: " if record.levelno >= logging.WARNING else "")
        return f"[titan] {self.formatTime(record, '%H:%M:%S')} {mark}{super().format(record)}"


def init_logger() -> None:
    """Print the package's log records on the current stdout, marked with [titan].

    Rank 0, and the ranks that the variable LOG_RANK lists ("all" is every rank), print records from
    INFO up; the other ranks print warnings and errors.
    """
    if sys.stdout is None:
        # `>&-` closed stdout: the next opened file would get stdout's descriptor, and all prints.
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # under LANG=C, stdout may accept only ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = _StdoutHandler(sys.stdout)
    rank, shown = os.environ.get("RANK", "0"), os.environ.get("LOG_RANK") or "0"
    handler.setFormatter(_LineFormatter(rank))
    if rank not in ("0", *shown.split(",")) and shown != "all":
        handler.setLevel(logging.WARNING)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    # Otherwise a library's handler on the root logger would print each line a second time.
    logger.propagate = False
    # Must be set before the profiler loads, or Kineto writes INFO lines to stderr.
    os.environ["KINETO_LOG_LEVEL"] = "5"


@contextlib.contextmanager
def saying_once_per(memory: set[Any]) -> Iterator[None]:
    """A context in which `warn_once`, on this thread, remembers messages in `memory`."""
    token = _said.set(memory)
    try:
        yield
    finally:
        _said.reset(token)


def already_said() -> set[Any]:
    """Return the messages that `warn_once` has logged for the current engine, or else for the process."""
    return _said.get()


def warn_once(logger: logging.Logger, msg: str) -> None:
    """Log a warning once per engine; outside of an engine's calls, once per process."""
    if msg not in already_said():
        already_said().add(msg)
        logger.warning(msg)
