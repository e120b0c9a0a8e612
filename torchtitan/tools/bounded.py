"""Calls with a limit on time and memory, for input from untrusted files that could take forever.

Python cannot interrupt a power of integers or a regular-expression match, so such calls run in another
process, which the operating system kills at the limit.
"""

import functools
import multiprocessing.spawn
import os
import pkgutil
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from torchtitan.tools.errors import RunError
from torchtitan.tools.signals import SIGNALS

# CPU time per call. Unlike wall time, it hardly grows on a busy machine.
SECONDS = 10.0
_OUT_OF_TIME = "it takes more than"
# Memory limit of the process, which only Linux enforces.
_BYTES = 2**30


class BoundedCallError(ValueError):
    """The called function raised an exception; this error has the exception's message."""


class OutOfBoundsError(RunError):
    """A call took too much time or memory; the message says which. The caller adds the file's name."""


def call(function: str, *arguments: Any) -> Any:
    """Return `function(*arguments)`, computed in another process, which is kept for later calls.

    function: "module:function", which the other process imports.
    Raises BoundedCallError if the function raises, OutOfBoundsError if the call exceeds a limit.
    """
    # One entry per process id, because a forked process must not use its parent's pipe.
    return _processes.setdefault(os.getpid(), _Process()).call(function, arguments)


def first_matches(patterns: Iterable[str], names: Iterable[str]) -> list[str | None]:
    """Return, for each name, the first regular expression that matches the full name, or None."""
    compiled = [(pattern, re.compile(pattern)) for pattern in patterns]
    return [next((p for p, regex in compiled if regex.fullmatch(name)), None) for name in names]


class _Process:
    """Runs the calls in another process. A call starts the process if it isn't running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            for is_retry in (False, True):
                try:
                    error, answer = self._ask(function, arguments)
                    break
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    reason = self._end()  # the process may have been killed: retry once
                    if is_retry or reason.startswith(_OUT_OF_TIME):
                        raise OutOfBoundsError(reason) from None
                except BaseException:  # the next call must not receive an interrupted call's answer
                    self._end()
                    raise
        if error is not None:
            raise error(answer)
        return answer

    def _ask(self, function: str, arguments: tuple[Any, ...]) -> Any:
        if self._process is None:
            self._start()
        self._pipe.send((function, arguments, SECONDS))
        return self._pipe.recv()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # multiprocessing would run the user's script again, or fork a process that has threads.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from torchtitan.tools import bounded; "
            f"bounded._answer_calls({theirs.fileno()})"
        )
        command = [os.fsdecode(multiprocessing.spawn.get_executable()), "-c", code]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._at_exit = Finalize(self, self._end, exitpriority=10)

    def _end(self) -> str:
        """Kill the worker process if it is still running; return why it ended."""
        process, self._process = self._process, None
        if process is None:  # this process exits: its at-exit handler has ended the worker
            return "this process ends"
        self._pipe.close()
        self._at_exit.cancel()
        process.kill()  # closing our end is not enough: forked data workers hold the pipe open too
        code = process.wait()
        if code == -signal.SIGPROF:
            return f"{_OUT_OF_TIME} {SECONDS:g} seconds of processor time"
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


_processes: dict[int, _Process] = {}  # id of a process -> its worker


def _answer_calls(file: int) -> None:
    """Run the calls that arrive through a pipe, until its other end is closed."""
    global SECONDS
    for number in SIGNALS:  # the calling process decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in ((resource.RLIMIT_DATA, _BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # a lower limit is set already
            resource.setrlimit(limit, (most, most))
    find = functools.cache(pkgutil.resolve_name)
    with Connection(file) as pipe, suppress(EOFError, OSError):
        while True:
            function, arguments, SECONDS = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            answer: tuple[type[Exception] | None, Any]
            try:
                answer = None, find(function)(*arguments)
            except MemoryError:
                reason = f"it takes more than {_BYTES / 2**30:g} GiB of memory"
                answer = OutOfBoundsError, reason
            except BaseException as error:
                answer = BoundedCallError, str(error) or type(error).__name__
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send(answer)
