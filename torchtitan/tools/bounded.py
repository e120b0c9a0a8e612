"""Calls with a bound on time and memory, for what a file from elsewhere can make endless.

Python cannot interrupt a power of integers or a match of a regular expression, so such calls are made
in another process, which the system ends at the bounds.
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

SECONDS = 10.0  # processor time of a call, which hardly grows on a busy machine
_OUT_OF_TIME = "it takes more than"
_BYTES = 2**30  # memory of the process; only Linux keeps to it


class BoundedCallError(ValueError):
    """A function raised an error; the message is that of the error."""


class OutOfBoundsError(RunError):
    """A call took too much time or memory; the message says which, and names no file."""


def call(function: str, *arguments: Any) -> Any:
    """Return `function(*arguments)`, computed in another process, which is kept for later calls.

    function: "module:function", which the process imports.
    Raises BoundedCallError for any exception of the function, OutOfBoundsError if it takes too much.
    """
    # By process, because a fork must not use its parent's pipe.
    return _processes.setdefault(os.getpid(), _Process()).call(function, arguments)


def restart_clock() -> None:
    """Give a function that is called here `SECONDS` for what follows."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)


def first_matches(patterns: Iterable[str], names: Iterable[str]) -> list[str | None]:
    """Return for each name the first of the regular expressions that matches all of it, or None."""
    compiled = [(pattern, re.compile(pattern)) for pattern in patterns]
    return [next((p for p, regex in compiled if regex.fullmatch(name)), None) for name in names]


class _Process:
    """A process for calls, which is started at the first call, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            try:
                try:
                    error, answer = self._ask(function, arguments)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    if (reason := self._end()).startswith(_OUT_OF_TIME):
                        raise OutOfBoundsError(reason) from None
                    error, answer = self._ask(function, arguments)  # it was killed: once more
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise OutOfBoundsError(self._end()) from None
            except BaseException:  # the answer of an interrupted call must not answer the next one
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
        # Not with multiprocessing, which would run the user's script again, or fork our threads.
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
        """End the process; return why it has ended, if it had."""
        process, self._process = self._process, None
        if process is None:  # the end of this process came between
            return "this process ends"
        self._pipe.close()
        self._at_exit.cancel()
        process.kill()  # forked data workers hold the pipe open; one that has ended keeps its exit code
        code = process.wait()
        if code == -signal.SIGPROF:
            return f"{_OUT_OF_TIME} {SECONDS:g} seconds of processor time"
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


_processes: dict[int, _Process] = {}  # process id -> its process for calls


def _answer_calls(file: int) -> None:
    """Answer the calls that come through a pipe until its other end is closed."""
    global SECONDS
    for number in SIGNALS:  # the process of the calls decides when to end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in ((resource.RLIMIT_DATA, _BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # a lower limit is set already
            resource.setrlimit(limit, (most, most))
    find = functools.cache(pkgutil.resolve_name)
    with Connection(file) as pipe, suppress(EOFError, OSError):
        while True:
            function, arguments, SECONDS = pipe.recv()
            restart_clock()
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
