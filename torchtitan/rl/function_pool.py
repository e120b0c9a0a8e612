"""Runs the user's reward functions and tools in separate processes, with a time limit per call.

If a call hangs or its process dies, its `Result` has a `failure`, and the run continues.
"""

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from torchtitan.rl.rewards import scores_of
from torchtitan.tools.host import signal_at_parents_death

Call = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments of a function."""

# Time limit to start a process and import the user's module.
_SECONDS_TO_START = 300

# The pipe of a dead process usually closes at once. But if the process has forked, its child may hold the
# pipe open, so the pool also checks whether the process is alive.
_SECONDS_BETWEEN_CHECKS = 0.5


@dataclass(frozen=True)
class Result:
    """The result of a call: a value, an exception as text (`error`), or why there is neither (`failure`)."""

    value: Any = None
    error: str | None = None
    failure: str | None = None


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class FunctionPool:
    """Calls functions in `n_processes` worker processes; this process has one waiting thread per worker.

    functions: one or several names, module:function, which each process imports.
    timeout_seconds: timeout of one call. After a timeout, the pool kills the process and all processes that
        it started, except processes in another session. The next call starts a new process.
    convert: converts a function's return value in the worker, before the value is sent back.
    what: the functions' name in messages. keys: config keys of the functions and of the time limit.
    """

    def __init__(
        self,
        functions: str | Sequence[str],
        n_processes: int,
        timeout_seconds: float,
        *,
        convert: Callable[[Any], Any] = scores_of,
        what: str = "the reward function",
        keys: tuple[str, str] = ("rl.task.reward_fn", "rl.task.reward_timeout_seconds"),
    ):
        self._functions = [functions] if isinstance(functions, str) else list(functions)
        self._timeout_seconds = timeout_seconds
        self._convert, self._what, self._keys = convert, what, keys
        self._threads, self._of_thread = ThreadPoolExecutor(n_processes, "calls"), threading.local()
        # Never replace this list, because the finalizer holds it.
        self._workers: list[_Worker] = []

        # Like the finalizer of multiprocessing's pools, this one runs at exit before multiprocessing sends
        # SIGTERM to the workers, and does not run in a forked copy of this process.
        Finalize(self, _kill_all, (self._workers,), exitpriority=10)

    def call_all(self, calls: Sequence[Call], numbers: Sequence[int] | None = None) -> list[Result]:
        """Return the result of each call, in order. numbers: index of each call's function, default 0.

        Raises ValueError if a process cannot import the functions.
        """
        pairs = zip(numbers or [0] * len(calls), calls, strict=True)
        futures = [self._threads.submit(self._call, number, call) for number, call in pairs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            # End the processes, so that the other threads' calls return.
            self.close()
            wait(futures)
            # End processes that threads started after the first `close`.
            self.close()
            raise

    def _call(self, number: int, call: Call) -> Result:
        process, pipe = worker = self._worker()
        try:
            # OSError: the process has ended. Then reading the pipe below fails, too.
            with suppress(OSError):
                pipe.send((number, *call))
        except RecursionError as error:
            # The arguments are nested too deep to pickle, so nothing was sent.
            return Result(error=f"RecursionError: {error}")
        deadline, has_ended = time.monotonic() + self._timeout_seconds, False
        while not pipe.poll(max(0.0, min(_SECONDS_BETWEEN_CHECKS, deadline - time.monotonic()))):
            if has_ended:
                break
            if time.monotonic() >= deadline:
                self._end(worker)
                limit = f"{self._timeout_seconds:g} s ({self._keys[1]})"
                return Result(failure=f"{self._what} took longer than {limit}")
            # If the process has ended, poll once more: it may have answered before its end.
            has_ended = not process.is_alive()
        else:
            # OSError: the process died while it sent the result.
            with suppress(EOFError, OSError):
                return pipe.recv()
        self._end(worker)
        code = process.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return Result(failure=f"{self._what}'s process ended ({how})")

    def _worker(self) -> _Worker:
        """Return this thread's process; start a new one if the thread has none or its process has died."""
        worker = getattr(self._of_thread, "worker", None)
        if worker in self._workers:
            if worker.process.is_alive():
                return worker
            self._end(worker)  # kill the children of the dead process

        # Spawn, not fork, because this process has threads and perhaps uses a device.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._functions, self._convert)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        worker = self._of_thread.worker = _Worker(process, ours)
        self._workers.append(worker)
        problem: Any = f"it did not start within {_SECONDS_TO_START} s"
        if ours.poll(_SECONDS_TO_START):
            problem = "it ended at once"
            with suppress(EOFError, OSError):
                problem = ours.recv()
        if problem is not None:
            raise ValueError(
                f"a process for {self._keys[0]} = {', '.join(self._functions)!r} cannot be started: "
                f"{problem}; make sure that a new process can import the function's module"
            )
        return worker

    def _end(self, worker: _Worker) -> None:
        _kill(worker)
        # ValueError: `close` has removed the worker already.
        with suppress(ValueError):
            self._workers.remove(worker)

    def close(self) -> None:
        """End all processes; they also end with this process. Safe to call twice."""
        _kill_all(self._workers)


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        _kill(workers.pop())


def _kill(worker: _Worker) -> None:
    # `_work` makes the process a group leader, so killing the group also kills processes of its calls.
    with suppress(OSError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _work(pipe: Connection, names: Sequence[str], convert: Callable[[Any], Any]) -> None:
    """The main loop of a worker process: answer calls until the pool closes the pipe."""
    # A generating rank ignores SIGTERM, and this process inherits the signal handlers. But when the parent
    # exits, multiprocessing ends its daemons with SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    # A killed parent runs no `close`, and a call that hangs does not notice the closed pipe.
    signal_at_parents_death(signal.SIGKILL, whole_group=True)
    # In the parent this process stays a daemon, which ends with the parent. But the flag is cleared here,
    # because daemons must not start processes, and the user's functions may.
    multiprocessing.current_process().daemon = False
    functions = []
    try:
        for name in names:
            module, _, function_name = name.partition(":")
            functions.append(getattr(importlib.import_module(module), function_name))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    while True:
        try:
            number, arguments, by_name = pipe.recv()
        except EOFError:
            return
        try:
            result = Result(value=convert(functions[number](*arguments, **by_name)))
        except SystemExit:
            os._exit(1)
        except Exception as error:
            result = Result(error=f"{type(error).__name__}: {error}")
        pipe.send(result)
