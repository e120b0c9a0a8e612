"""Functions of the user in processes of their own, each call with a time limit: rewards, tools.

One that hangs or dies is a verdict and a sentence, not the end of the run.
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
"""Arguments of a function: by place, and by name."""

_SECONDS_TO_START = 300  # a process, and the import of the user's module
_SECONDS_TO_END = 5  # a process that has closed its pipe
# A process that died is told by the end of its pipe, unless one that it forked holds it open.
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Verdict:
    """What a function did: `value` is what it returned.

    error: what it raised, as a text. failure: why there is neither, as a sentence.
    """

    value: Any = None
    error: str | None = None
    failure: str | None = None


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    call: int | None = None  # the index of what it works on
    deadline: float = 0.0
    refused: Verdict | None = None  # on a call that could not be sent


class VerifierPool:
    """Calls functions in `n_processes` others.

    functions: module:function of one, or of several; found anew in each process.
    timeout_seconds: of one call; its process is then killed with all that it started, but for what has
        made a session of its own, and another one is started.
    convert: what a function returned becomes this there, which has to travel back.
    what: the functions' name in sentences. keys: of the config that name them and the limit.
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
        # As of multiprocessing's own pools: not in a fork, and before processes get a SIGTERM.
        Finalize(self, _kill_all, (self._workers,), exitpriority=10)

    def call_all(
        self, calls: Sequence[Call], numbers: Sequence[int] | None = None
    ) -> list[Verdict]:
        """A verdict for each call, in their order. numbers: of their functions, 0 by default."""
        waiting, verdicts = deque(range(len(calls))), [Verdict()] * len(calls)
        n_open = len(calls)
        while n_open:
            self._hand_out(calls, numbers, waiting)
            for worker in [w for w in self._workers if w.call is not None]:
                verdict = self._verdict(worker)
                if verdict is not None:
                    assert worker.call is not None
                    verdicts[worker.call], worker.call = verdict, None
                    n_open -= 1
            # One that dies in a call is kept until `_verdict` has found it.
            for worker in [w for w in self._workers if w.call is None]:
                if not worker.process.is_alive():
                    self._workers.remove(worker)
                    _kill(worker)
            busy = [w for w in self._workers if w.call is not None]
            if busy:
                until = min(worker.deadline for worker in busy)
                seconds = min(until - time.monotonic(), _SECONDS_BETWEEN_LOOKS)
                wait([w.pipe for w in busy], max(0.0, seconds))
        return verdicts

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
            self.close()  # among them those that wait behind the one that failed
            raise
        for worker in (idle + started)[: len(waiting)]:
            worker.call = waiting.popleft()
            worker.deadline = time.monotonic() + self._timeout_seconds
            number = 0 if numbers is None else numbers[worker.call]
            try:
                # One that has ended since is found by `_verdict`.
                with suppress(OSError):
                    worker.pipe.send((number, *calls[worker.call]))
            except RecursionError as error:  # arguments too deep to travel: nothing was sent
                worker.refused = Verdict(error=f"RecursionError: {error}")

    def _verdict(self, worker: _Worker) -> Verdict | None:
        """What came of a worker's call; None if it is still at it."""
        if worker.refused is not None:
            verdict, worker.refused = worker.refused, None
            return verdict
        has_ended = not worker.process.is_alive()  # asked first: it may have answered before
        if worker.pipe.poll():
            try:
                return worker.pipe.recv()
            except (EOFError, OSError):  # OSError: in the middle of a verdict
                has_ended = True
                # Not `join` with a limit: it has none where the process closed all its files.
                ends_by = time.monotonic() + _SECONDS_TO_END
                while worker.process.is_alive() and time.monotonic() < ends_by:
                    time.sleep(0.01)
        if has_ended:
            code = worker.process.exitcode
            _kill(worker)
            how = "it closed its pipe" if code is None else f"exit code {code}"
            if code is not None and code < 0:
                how = f"signal {-code}"
            return Verdict(failure=f"{self._what}'s process ended ({how})")
        if time.monotonic() < worker.deadline:
            return None
        _kill(worker)
        return Verdict(
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
                f"{ready}; its module is imported again there"
            )

    def close(self) -> None:
        """End all processes, as does the end of this one. Safe to call twice."""
        _kill_all(self._workers)


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        _kill(workers.pop())


def _kill(worker: _Worker) -> None:
    # Its group has its number, once it has begun. Processes that a call has left stay in it.
    with suppress(OSError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _work(pipe: Connection, names: Sequence[str], convert: Callable[[Any], Any]) -> None:
    """Answer calls until the other side is gone."""
    # A generating rank ignores it, which is inherited, and at exit waits for us to obey it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    # A pool that is killed closes nothing, and a call that hangs never looks at the pipe.
    signal_at_parents_death(signal.SIGKILL, whole_group=True)
    # To the pool it is a daemon, which ends with it. A function may still use multiprocessing.
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
            verdict = Verdict(value=convert(functions[number](*arguments, **by_name)))
        except Exception as error:
            verdict = Verdict(error=f"{type(error).__name__}: {error}")
        pipe.send(verdict)
