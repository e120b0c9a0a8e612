"""The history of a run: starts, saves, faults and ends, one JSON line each.

The context `recording`, which `torchtitan.train.main` and a trainer's `train` enter, listens to the
package's logger. It records every warning, and every line that was logged with `extra=event(...)`.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torchtitan
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger, warn_once

FILE_NAME = "events.jsonl"
MAX_EVENTS_PER_START = 10_000


def event(kind: str, step: int | None = None, **details: Any) -> dict[str, Any]:
    """Return the `extra` argument for a logging call; `recording` then writes the log line as an event.

    step: the number of optimizer steps done. details: finite numbers and strings.
    """
    place = {} if step is None else {"step": step}
    return {"event": {"kind": kind, **place, **details}}


@contextlib.contextmanager
def recording(config: Any) -> Iterator[None]:
    """Append the events of the block, with its start and end, to `<dump_folder>/events.jsonl`.

    Rank 0 writes the events. If an exception leaves the block, the rank that raised it writes a
    "fault" event. A failed write only logs a warning. A nested recording of the same folder does nothing,
    because the outer recording writes the start and the end.
    """
    log = _EventLog(os.path.join(config.job.dump_folder, FILE_NAME))
    if any(isinstance(other, _EventLog) and other.path == log.path for other in logger.handlers):
        yield
        return
    is_rank_zero = log.rank == 0
    if is_rank_zero:
        log.end_unfinished_line()
        values = config.to_dict()
        settings, defaults = flat_settings(values), flat_settings(type(config)().to_dict())
        text = json.dumps(values, default=str, sort_keys=True)
        log.write(
            "start",
            config.job.description,
            versions={
                "torchtitan": torchtitan.__version__,
                # Not imported here, because programs that only read reports do not need torch.
                "torch": getattr(sys.modules.get("torch"), "__version__", None),
                "python": platform.python_version(),
            },
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            program=os.path.basename(sys.argv[0]),
            config_digest=hashlib.sha256(text.encode()).hexdigest()[:16],
            config=values,
            not_default=[k for k, v in settings.items() if k not in defaults or defaults[k] != v],
        )
        logger.addHandler(log)
    try:
        yield
        if is_rank_zero:
            log.write("end", "ended")
    except BaseException as error:
        message = str(error) or type(error).__name__
        log.write("fault", message, error=type(error).__name__, exit_code=exit_code(error))
        raise
    finally:
        logger.removeHandler(log)


def recorded(train: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate a method without arguments so that it runs in `recording(self.job_config)`."""

    @functools.wraps(train)
    def wrapper(self: Any) -> None:
        with recording(self.job_config):
            train(self)

    return wrapper


class _EventLog(logging.Handler):
    """Appends warnings, and log records with an `event`, to a file that other ranks also append to."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.INFO)
        self.path = path
        rank = os.environ.get("RANK", "0")
        self.rank = int(rank) if rank.isdecimal() else 0
        self._num_written = 0

    def emit(self, record: logging.LogRecord) -> None:
        details = {"kind": "warning"} if record.levelno >= logging.WARNING else None
        details = getattr(record, "event", details)
        if details is not None and self._num_written < MAX_EVENTS_PER_START:
            # The console's handler reports a bad format.
            with contextlib.suppress(TypeError, ValueError):
                self.write(message=record.getMessage(), **details)

    def write(self, kind: str, message: str, **details: Any) -> None:
        record = {"wall_time": time.time(), "kind": kind, "rank": self.rank, "message": message}
        self._append(json.dumps(record | details, default=str) + "\n")
        self._num_written += 1

    def end_unfinished_line(self) -> None:
        """End a line that a full disk cut short, so the next event begins on its own line."""
        with contextlib.suppress(OSError), open_file(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                self._append("\n")

    def _append(self, text: str) -> None:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            # Unbuffered, so each line is one write.
            with open_file(self.path, "ab", buffering=0) as file:
                file.write(text.encode(errors="replace"))
        except OSError as error:
            warn_once(logger, f"The run goes on, but without a record of its events: {error}")


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested tables as {"section.key": value}."""
    settings: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and len(name) < 200:
            settings |= flat_settings(value, f"{name}.")
        else:
            settings[name] = value
    return settings


def exit_code(error: BaseException) -> int:
    """Return the code with which `torchtitan.train.main` exits after this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, ConfigError) else 1
