"""The signals that end a run, and the thread that reacts to these signals.

`torchtitan.train` starts the thread before it imports torch, so this module imports nothing slow.
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
# A signal this soon after the first is ignored: `timeout` signals its child, then the child's group.
_SECONDS_FOR_ONE_SIGNAL = 0.1
# Time to import torch and to reach the other ranks after an early signal.
_SECONDS_TO_MEET = 60


class SignalThread:
    """Between `start` and `close`, a thread calls `hear(number)` for the first signal of SIGNALS.

    A second signal ends the process at once, with exit code 128 + its number, even if the main
    thread hangs. Signals that are ignored or have a handler of the program's own are left alone. If
    several such threads run, the last one started gets the signals.

    takes_sigint: if False, SIGINT raises KeyboardInterrupt as usual.
    """

    def __init__(self, hear: Callable[[int], None], takes_sigint: bool = True) -> None:
        self._hear, self._takes_sigint = hear, takes_sigint
        # Signal -> the handler to restore.
        self.handlers: dict[int, Any] = {}

    def start(self) -> None:
        replaceable = [signal.SIG_DFL, _left_to_thread]
        if self._takes_sigint:
            replaceable.append(signal.default_int_handler)
        taken = [number for number in SIGNALS if signal.getsignal(number) in replaceable]
        if not taken or threading.current_thread() is not threading.main_thread():
            return
        # Python runs signal handlers in the main thread, which may hang in a collective. But Python
        # writes each signal's number to the wakeup pipe at once, and a thread can read the pipe.
        read, self._written_by_signals = os.pipe()
        os.set_blocking(self._written_by_signals, False)
        self._thread = threading.Thread(
            target=self._read, args=(read,), name="signals", daemon=True
        )
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(
            self._written_by_signals, warn_on_full_buffer=False
        )
        self.handlers = {number: signal.signal(number, _left_to_thread) for number in taken}
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
    """An empty handler, for signals that the thread reads from the pipe."""


@functools.cache
def _leave_signals_of_forks_alone() -> None:
    """Restore the old handlers in forked children: their signals must not be written to this pipe."""

    def restore() -> None:
        if _listening:
            signal.set_wakeup_fd(-1)
            for number, handler in _listening[0].handlers.items():
                signal.signal(number, handler)
            _listening.clear()

    os.register_at_fork(after_in_child=restore)


def end_now(number: int, message: str) -> None:
    """Print a message on stderr and end this process with the signal's exit code."""
    print(message, file=sys.stderr, flush=True)
    os._exit(128 + number)


class StartSignals:
    """Ends a rank that gets a signal before training; first the rank connects to its peers to tell them."""

    def __init__(self) -> None:
        self._thread = SignalThread(self._hear)
        self._number = 0
        self._tell: Callable[[str], None] | None = None

    def start(self) -> None:
        """React to signals from now on, unless this process has no peers. Idempotent."""
        if not self._thread.handlers and has_peers():
            self._thread.start()

    def tell_by(self, tell: Callable[[str], None]) -> None:
        """Call `tell(message)` and end this rank at the next signal, or now if one came already."""
        self._tell = tell
        if self._number:
            self._end()

    def close(self) -> None:
        self._thread.close()
        self._number, self._tell = 0, None

    def _hear(self, number: int) -> None:
        self._number = number
        if self._tell is not None:
            self._end()
        timer = threading.Timer(_SECONDS_TO_MEET, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        message = f"{signal.Signals(self._number).name}: the run ends; what was not saved is lost"
        if self._tell is not None:
            self._tell(message)
        end_now(self._number, message)


at_start = StartSignals()
