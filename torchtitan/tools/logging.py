"""The package's one logger.

A program that embeds the engine gets its records by propagation; only our `main()` calls `init_logger`.
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

_said: ContextVar[set[Any]] = ContextVar("said", default=set())  # noqa: B039, the process's own


class _StdoutHandler(logging.StreamHandler):
    """Writes to stdout; if that is closed (`| head`), the run goes on silently."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        else:
            super().handleError(record)


class _LineFormatter(logging.Formatter):
    """Formats a line as `[titan] 12:34:56 message`, with the level too from WARNING up."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"[titan] {self.formatTime(record, '%H:%M:%S')} {level}{super().format(record)}"


def init_logger() -> None:
    """Print the package's records from INFO up on the present stdout, each line marked with [titan]."""
    if sys.stdout is None:
        # Closed by `>&-`: the next file would get its number, and all that is printed.
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # under LANG=C it may accept only ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = _StdoutHandler(sys.stdout)
    handler.setFormatter(_LineFormatter())
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    # Otherwise a library's handler on the root logger would print each line a second time.
    logger.propagate = False
    # Must be set before the profiler loads, or Kineto writes INFO lines to stderr.
    os.environ["KINETO_LOG_LEVEL"] = "5"


@contextlib.contextmanager
def saying_once_per(memory: set[Any]) -> Iterator[None]:
    """Inside, in this thread, `warn_once` remembers messages in `memory`, such as an engine's."""
    token = _said.set(memory)
    try:
        yield
    finally:
        _said.reset(token)


def already_said() -> set[Any]:
    """Return the memory of what is said once: the engine's in its calls, else the process's."""
    return _said.get()


def warn_once(logger: logging.Logger, msg: str) -> None:
    """Log `msg` as a warning, once per engine, or outside of an engine's calls once per process."""
    if msg not in already_said():
        already_said().add(msg)
        logger.warning(msg)
