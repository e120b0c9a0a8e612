"""The user's functions in separate processes, each call with a time limit: rewards and tools.

A call that hangs or dies has a result that says so; it does not end the run.
"""

import importlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

from torchtitan.tools.host import signal_at_parents_death

Call = tuple[Sequence[Any], dict[str, Any]]
"""Arguments of a function: by position, and by name."""

_SECONDS_TO_START = 300  # a process, with the import of the user's module
_SECONDS_TO_END = 5  # a process that has closed its pipe
# A dead process is usually noticed at once, because its pipe ends. But a process that it forked may
# hold the pipe open.
_SECONDS_BETWEEN_CHECKS = 0.5


@dataclass(frozen=True)
class Result:
    """The result of a call: `value` is what the function returned.

    error: its exception as text. failure: a sentence on why there is neither a value nor an error.
    """

    value: Any = None
    error: str | None = None
    failure: str | None = None


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    call: int | None = None  # index of its current call
    deadline: float = 0.0
    unsent: Result | None = None  # the result of a call that could not be sent


class FunctionPool:
    """Calls functions in `n_processes` other processes.

    functions: module:function of one function, or of several; imported again in each process.
    timeout_seconds: of one call. After it the process is killed with all processes that it started,
        except those with a session of their own, and a new process is started.
    convert: applied to a function's return value in its process, before it is sent back.
    what: the functions' name in messages. keys: config keys of the functions and of the time limit.
    """

    def __init__(
        self,
        functions: str | Sequence[str],
        n_processes: int,
        timeout_seconds: float,
        *,
        convert: Callable[[Any], Any] = float,
        what: str = "the reward function",
        keys: tuple[str, str] = ("rl.task.reward_fn", "rl.task.reward_timeout_seconds"),
    ):
        self._functions = [functions] if isinstance(functions, str) else list(functions)
        self._n_processes, self._timeout_seconds = n_processes, timeout_seconds
        self._convert, self._what, self._keys = convert, what, keys
        self._workers: list[_Worker] = []  # always this list, which is cleared at exit
        # As multiprocessing's own pools do: not in a fork, and before processes get a SIGTERM.
        Finalize(self, _kill_all, (self._workers,), exitpriority=10)

    def call_all(self, calls: Sequence[Call], numbers: Sequence[int] | None = None) -> list[Result]:
        """Return the result of each call, in order. numbers: of the calls' functions, 0 by default."""
        waiting, results = deque(range(len(calls))), [Result()] * len(calls)
        n_open = len(calls)
        while n_open:
            self._hand_out(calls, numbers, waiting)
            for worker in [w for w in self._workers if w.call is not None]:
                result = self._result(worker)
                if result is not None:
                    assert worker.call is not None
                    results[worker.call], worker.call = result, None
                    n_open -= 1
            # A worker that died during a call is kept until `_result` has noticed.
            for worker in [w for w in self._workers if w.call is None]:
                if not worker.process.is_alive():
                    self._workers.remove(worker)
                    _kill(worker)
            busy = [w for w in self._workers if w.call is not None]
            if busy:
                until = min(worker.deadline for worker in busy)
                seconds = min(until - time.monotonic(), _SECONDS_BETWEEN_CHECKS)
                wait([w.pipe for w in busy], max(0.0, seconds))
        return results

    def _hand_out(
        self, calls: Sequence[Call], numbers: Sequence[int] | None, waiting: deque[int]
    ) -> None:
        idle = [w for w in self._workers if w.call is None and w.process.is_alive()]
        n_new = min(self._n_processes - len(self._workers), len(waiting) - len(idle))
        started = [self._start() for _ in range(max(0, n_new))]
        self._workers += started
        try:
            for worker in started:
                self._wait_until_ready(worker)
        except BaseException:
            self.close()  # also the workers that were not waited for yet
            raise
        for worker in (idle + started)[: len(waiting)]:
            worker.call = waiting.popleft()
            worker.deadline = time.monotonic() + self._timeout_seconds
            number = 0 if numbers is None else numbers[worker.call]
            try:
                with suppress(OSError):  # the worker has ended, which `_result` notices
                    worker.pipe.send((number, *calls[worker.call]))
            except RecursionError as error:  # arguments nested too deep to pickle: nothing was sent
                worker.unsent = Result(error=f"RecursionError: {error}")

    def _result(self, worker: _Worker) -> Result | None:
        """Return the result of a worker's call; None if it is still running."""
        if worker.unsent is not None:
            result, worker.unsent = worker.unsent, None
            return result
        has_ended = not worker.process.is_alive()  # before `poll`: it may have answered and ended
        if worker.pipe.poll():
            try:
                return worker.pipe.recv()
            except (EOFError, OSError):  # OSError: in the middle of a result
                has_ended = True
                # Not `join` with a time limit, which is ignored if the process closed all its files.
                ends_by = time.monotonic() + _SECONDS_TO_END
                while worker.process.is_alive() and time.monotonic() < ends_by:
                    time.sleep(0.01)
        if has_ended:
            code = worker.process.exitcode
            _kill(worker)
            how = "it closed its pipe" if code is None else f"exit code {code}"
            if code is not None and code < 0:
                how = f"signal {-code}"
            return Result(failure=f"{self._what}'s process ended ({how})")
        if time.monotonic() < worker.deadline:
            return None
        _kill(worker)
        return Result(
            failure=f"{self._what} took longer than {self._timeout_seconds:g} s ({self._keys[1]})"
        )

    def _start(self) -> _Worker:
        # Not a fork: this process has threads, and perhaps a device.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._functions, self._convert)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _wait_until_ready(self, worker: _Worker) -> None:
        ready: Any = f"it did not start within {_SECONDS_TO_START} s"
        if worker.pipe.poll(_SECONDS_TO_START):
            try:
                ready = worker.pipe.recv()
            except EOFError:
                ready = "it ended at once"
        if ready is not None:
            _kill(worker)
            raise ValueError(
                f"a process for {self._keys[0]} = {', '.join(self._functions)!r} cannot be started: "
                f"{ready}; the process imports the function's module again"
            )

    def close(self) -> None:
        """End all processes; they also end with this process. Safe to call twice."""
        _kill_all(self._workers)


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        _kill(workers.pop())


def _kill(worker: _Worker) -> None:
    # Once begun, the process leads a group of its own, with the processes that its calls left behind.
    with suppress(OSError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _work(pipe: Connection, names: Sequence[str], convert: Callable[[Any], Any]) -> None:
    """Answer calls until the pool is gone."""
    # A generating rank ignores SIGTERM, which is inherited, but at exit it waits until SIGTERM ends us.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    # A killed pool closes nothing, and a call that hangs never reads the pipe.
    signal_at_parents_death(signal.SIGKILL, whole_group=True)
    # The pool started it as a daemon, to end with it. But daemons must not start processes, and a
    # function may.
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
        except Exception as error:
            result = Result(error=f"{type(error).__name__}: {error}")
        pipe.send(result)
