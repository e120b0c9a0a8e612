"""Signals that ask a run to end: which they are, and which part of the run hears them.

`torchtitan.train` listens before it loads torch, so nothing heavy is imported here.
"""

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torchtitan.tools.host import has_peers

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` sends one signal twice: to its child, and to the child's process group.
_SECONDS_FOR_ONE_SIGNAL = 0.1
# How long a rank that was told to end goes on with its imports, and then waits for the others.
_SECONDS_TO_IMPORT = 60
_SECONDS_TO_MEET = 8


class SignalThread:
    """Between `start` and `close`, a thread calls `hear(number)` for the first of SIGNALS.

    A second one ends the process at once, with 128 + its number, even if the main thread hangs.
    Signals that are ignored (SIGHUP under nohup), or for which the process has a handler of its
    own, are left alone. Of several such threads the one that was started last hears.

    takes_sigint: else SIGINT raises KeyboardInterrupt, as usual.
    """

    def __init__(self, hear: Callable[[int], None], takes_sigint: bool = True) -> None:
        self._hear, self._takes_sigint = hear, takes_sigint
        self.handlers: dict[int, Any] = {}  # signal -> its handler before

    def start(self) -> None:
        free = [signal.SIG_DFL, _left_to_thread]
        if self._takes_sigint:
            free.append(signal.default_int_handler)
        heard = [number for number in SIGNALS if signal.getsignal(number) in free]
        if not heard or threading.current_thread() is not threading.main_thread():
            return
        # Python runs handlers in the main thread, which may hang in a collective. It writes each
        # signal's number into the wakeup pipe at once, and a thread reads that.
        read, self._written_by_signals = os.pipe()
        os.set_blocking(self._written_by_signals, False)
        self._thread = threading.Thread(
            target=self._read, args=(read,), name="signals", daemon=True
        )
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(
            self._written_by_signals, warn_on_full_buffer=False
        )
        self.handlers = {number: signal.signal(number, _left_to_thread) for number in heard}
        _listening.append(self)
        _leave_signals_of_forks_alone()

    def close(self) -> None:
        if self not in _listening:
            return
        _listening.remove(self)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._written_by_signals, b"\0")
        self._thread.join()
        os.close(self._written_by_signals)
        self.handlers = {}

    def _read(self, pipe: int) -> None:
        first_came_at = None
        while number := os.read(pipe, 1)[0]:
            if number not in self.handlers:
                continue
            now = time.monotonic()
            if first_came_at is None:
                first_came_at = now
                self._hear(number)
            elif now - first_came_at > _SECONDS_FOR_ONE_SIGNAL:
                name = signal.Signals(number).name
                end_now(number, f"{name} came as a second signal: ending without a checkpoint")
        os.close(pipe)


_listening: list[SignalThread] = []


def _left_to_thread(_number: int, _frame: Any) -> None:
    pass


@functools.cache
def _leave_signals_of_forks_alone() -> None:
    """A signal to a forked child must not be written into this process's pipe."""

    def restore() -> None:
        if _listening:
            signal.set_wakeup_fd(-1)
            for number, handler in _listening[0].handlers.items():
                signal.signal(number, handler)
            _listening.clear()

    os.register_at_fork(after_in_child=restore)


def end_now(number: int, message: str) -> None:
    """End this process as the signal would, with a message on stderr."""
    print(message, file=sys.stderr, flush=True)
    os._exit(128 + number)


class StartSignals:
    """Ends a rank that gets a signal before it trains, after telling the other ranks.

    Until ranks have met nobody can be told, and the others would wait for this one for minutes. So
    it first goes on to where they meet, and waits there for a few seconds at most.
    """

    def __init__(self) -> None:
        self._thread = SignalThread(self._hear)
        self._number = 0
        self._tell: Callable[[str], None] | None = None
        self._seconds_left = _SECONDS_TO_IMPORT

    def start(self) -> None:
        """Idempotent. A process without peers keeps Python's own handling of signals."""
        if not self._thread.handlers and has_peers():
            self._thread.start()

    def wait_for_peers(self) -> None:
        """What comes next is the wait for other ranks."""
        self._seconds_left = _SECONDS_TO_MEET
        if self._number:
            self._end_later()

    def tell_by(self, tell: Callable[[str], None]) -> None:
        """From here on a signal ends this rank at once, after `tell(message)`."""
        self._tell = tell
        if self._number:
            self._end()

    def close(self) -> None:
        self._thread.close()
        self._number, self._tell, self._seconds_left = 0, None, _SECONDS_TO_IMPORT

    def _hear(self, number: int) -> None:
        self._number = number
        if self._tell is not None:
            self._end()
        self._end_later()

    def _end_later(self) -> None:
        timer = threading.Timer(self._seconds_left, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        message = f"{signal.Signals(self._number).name}: the run ends; what was not saved is lost"
        if self._tell is not None:
            self._tell(message)
        end_now(self._number, message)


at_start = StartSignals()
