"""Ending a run early, on all ranks together: signals and a time limit."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.tools.host import seconds_since_start
from torchtitan.tools.signals import SIGNALS, SignalThread, end_now

# Stands for the time limit among signal numbers.
_TIME_LIMIT = 64


class StopRequest:
    """Decides whether to save and end after this step, with the same answer on every rank.

    The reason is a signal of `SIGNALS` that any rank received, or `training.time_limit_minutes`. Call
    `ask` and `answer` in each step, on every rank. If the config saves no checkpoints, the first
    signal ends the process (SIGINT raises KeyboardInterrupt).
    """

    def __init__(self, job_config: JobConfig) -> None:
        checkpoint = job_config.checkpoint
        self._can_save = checkpoint.enable and not checkpoint.load_only
        self._limit_seconds = job_config.training.time_limit_minutes * 60
        self._deadline = time.monotonic() - seconds_since_start() + self._limit_seconds
        self._timeout = timedelta(seconds=job_config.comm.init_timeout_seconds)
        # The last result of `answer`.
        self.reason: str | None = None
        self._signal = 0
        self._asked_at: float | None = None
        self._longest_step = self._longest_save = 0.0
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world_size = 0, 1
        self._question: tuple[torch.Tensor, Any] | None = None
        self._signals = SignalThread(self._hear, takes_sigint=self._can_save)

    def __enter__(self) -> "StopRequest":
        if self._can_save and dist.is_initialized() and dist.get_backend() != "fake":
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            if self._world_size > 1:
                # gloo, so that no step waits for the device; only this class uses the group
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._signals.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._signals.close()
        if self._group is not None and dist.is_initialized():
            with suppress(ValueError):  # the group was destroyed with the default group
                dist.destroy_process_group(self._group)

    def _hear(self, number: int) -> None:
        if not self._can_save:
            name = signal.Signals(number).name
            end_now(number, f"{name}: the run ends; nothing is saved (checkpoint.enable)")
        self._signal = number

    # ---- in each step ----

    def ask(self) -> None:
        """Start the all-reduce of the ranks' stop requests, which overlaps with this rank's work."""
        now = time.monotonic()
        if self._asked_at is not None:
            self._longest_step = max(self._longest_step, now - self._asked_at)
        self._asked_at = now
        own = self._signal or (_TIME_LIMIT if self._is_time_up(now) else 0)
        code = torch.tensor(own and own * self._world_size + self._rank, device="cpu")
        work = None
        if self._group is not None:
            work = dist.all_reduce(code, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._question = code, work

    def answer(self) -> str | None:
        """Return the reason to save and end now, or None. Collective; calls `ask` if needed."""
        if not self._can_save:
            return None
        if self._question is None:
            self.ask()
        (code, work), self._question = self._question, None
        if work is not None:
            work.wait()
        number, rank = divmod(int(code), self._world_size)
        if not number:
            return None
        if number == _TIME_LIMIT:
            minutes = self._limit_seconds / 60
            self.reason = f"training.time_limit_minutes = {minutes:g} leaves no more time"
        else:
            self.reason = f"{signal.Signals(number).name} came to rank {rank}"
        return self.reason

    def saved(self, seconds: float) -> None:
        """Record how long a save took, to reserve time for the last save."""
        self._longest_save = max(self._longest_save, seconds)

    def _is_time_up(self, now: float) -> bool:
        """Return True if another step with a save after it could exceed the time limit."""
        if not self._limit_seconds:
            return False
        for_save = max(1.5 * self._longest_save, min(60, 0.1 * self._limit_seconds))
        return now + self._longest_step + for_save > self._deadline


def leave_signals_to_trainer(_worker_id: int = 0) -> None:
    """Make a data worker ignore all signals but the trainer's SIGTERM, because the trainer still needs data."""
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # `sigwaitinfo` reports a signal's sender; handlers don't
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        # The parent is the trainer, even if a fork server started this worker.
        trainer = multiprocessing.parent_process()

        def end_with_trainer() -> None:
            while signal.sigwaitinfo([signal.SIGTERM]).si_pid != getattr(trainer, "pid", None):
                pass
            os._exit(0)

        threading.Thread(target=end_with_trainer, name="signals", daemon=True).start()
