"""Names the rank that keeps the others waiting, while a step is slow or before a collective times out.

A rank is late if another rank has entered more collectives of one of its process groups, and it has itself
entered more in no group. Rank 0 asks the ranks only while a step takes unusually long, over the
connections of `Peers`: a step at the usual speed sends nothing.
"""

import contextlib
import os
import socket
import statistics
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchtitan.config.job_config import Comm
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger

SECONDS_BETWEEN_TURNS = 0.2
READING_THREAD = "data of the next step"
_LONGEST_STACK = 15  # innermost calls that are printed
_FEWEST_STEPS = 5  # for a median
_SHORTEST_SLOW_STEP = 1.0  # seconds
_TIME_TO_ANSWER = 1.0  # seconds
_PARTS_OF_LIMIT = 6  # a stuck rank is looked for this often before its time is over


class Progress:
    """Which step a trainer is in. Its main thread writes, the thread of `Peers` reads."""

    def __init__(self) -> None:
        self.number = 0  # of the step that began last
        self.started_at: float | None = None  # None between two steps
        self.took: deque[tuple[int, float]] = deque(maxlen=64)  # (step, seconds) of the last steps

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.number, self.started_at = number, time.monotonic()
        try:
            yield
        finally:
            self.took.append((number, time.monotonic() - self.started_at))
            self.started_at = None


class State(NamedTuple):
    """Where a rank is. counts: process group -> collectives entered so far, and "step" -> its number.

    place: file, line and function of the rank's main thread. stack: given only if it was asked for.
    """

    counts: dict[str, int]
    place: str
    host: str
    stack: str = ""


def own_state(progress: Progress | None, with_stack: bool = False) -> State:
    """Return the state of this process. May be called from any thread."""
    counts = {"step": 0 if progress is None else progress.number}
    for group in list(torch_parts.world.pg_map):
        with contextlib.suppress(
            RuntimeError
        ):  # a backend that does not count, or a destroyed group
            counts[group.group_name] = torch_parts.collectives_so_far(group)
    frames = {t.name: sys._current_frames().get(t.ident or 0) for t in threading.enumerate()}
    frame = frames.get(threading.main_thread().name)
    place, function = _place_of(frame)
    if function == "next_step":  # the main thread waits for the thread that reads
        frame = frames.get(READING_THREAD) or frame
        place, _ = _place_of(frame)
    stack = "".join(traceback.format_stack(frame, limit=_LONGEST_STACK)) if with_stack else ""
    return State(counts, place, socket.gethostname(), stack)


def _place_of(frame: Any) -> tuple[str, str]:
    """Return ("file:line (function)", function) of the innermost frame outside torch and Python's library."""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        in_library = path.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in path
        if not (in_library or path.startswith((os.path.dirname(torch.__file__), "<"))):
            return f"{'/'.join(path.split(os.sep)[-2:])}:{frame.f_lineno} ({name})", name
        frame = frame.f_back
    return "an unknown place", ""


def late_among(states: Mapping[int, State]) -> list[int]:
    """Return the ranks that are behind another rank in a group, and ahead of no rank in any group."""
    numbers: dict[str, set[int]] = {}
    for state in states.values():
        for group, number in state.counts.items():
            numbers.setdefault(group, set()).add(number)
    return [
        rank
        for rank, state in states.items()
        if any(number < max(numbers[group]) for group, number in state.counts.items())
        and not any(number > min(numbers[group]) for group, number in state.counts.items())
    ]


class LateRanks:
    """Rank 0's search for late ranks. `turn` is called about every SECONDS_BETWEEN_TURNS.

    ask: sends a question to a rank, or to all ranks for None; True asks for the stack, too. The answers
        come to `take`.
    """

    def __init__(
        self,
        comm: Comm,
        progress: Progress,
        num_ranks: int,
        ask: Callable[[int | None, bool], None],
    ) -> None:
        self._comm, self._progress, self._num_ranks, self._ask = comm, progress, num_ranks, ask
        self._answers: dict[int, State] = {}
        self._asked_at: float | None = None  # None once the answers are judged
        # The step that may be slow (0: none), the median of those before, and when to look next.
        self._step, self._median, self._slow_after, self._look_after = 0, 0.0, 0.0, 0.0
        self._num_looks, self._late, self._last_seen = 0, Counter[int](), dict[int, State]()
        # For stuck ranks: rank -> (its counts, None without an answer; since when it has these).
        self._checked_at, self._own_counts = time.monotonic(), dict[str, int]()
        self._since: dict[int, tuple[dict[str, int] | None, float]] = {}
        self._told: set[int] = set()

    def take(self, rank: int, state: State) -> None:
        """Keep a rank's answer, or print the stack that it was asked for."""
        if state.stack:
            logger.warning(f"the stack of rank {rank}, innermost call last:\n{state.stack}")
        else:
            self._answers[rank] = state

    def turn(self, now: float) -> None:
        waited = now - self._asked_at if self._asked_at is not None else 0.0
        if len(self._answers) == self._num_ranks or waited > _TIME_TO_ANSWER:
            self._judge(now)
        self._end_slow_step()
        if self._asked_at is None and (self._is_slow(now) or self._hangs(now)):
            self._asked_at, self._answers = now, {0: own_state(self._progress)}
            self._ask(None, False)

    # ---- a slow step ----

    def _is_slow(self, now: float) -> bool:
        """Return True at growing intervals from half the time after which this step counts as slow."""
        started_at, number, took = (
            self._progress.started_at,
            self._progress.number,
            [seconds for _, seconds in list(self._progress.took)],
        )
        factor = self._comm.slow_step_factor
        if started_at is None or not factor or len(took) < _FEWEST_STEPS:
            return False
        if number != self._step and now - started_at >= _SHORTEST_SLOW_STEP / 2:
            self._step, self._median = number, statistics.median(took)
            self._slow_after = max(factor * self._median, _SHORTEST_SLOW_STEP)
            self._look_after = self._slow_after / 2
            self._num_looks, self._late, self._last_seen = 0, Counter(), {}
        if number != self._step or now - started_at < self._look_after:
            return False
        self._look_after = 1.2 * (now - started_at)
        return True

    def _end_slow_step(self) -> None:
        """Log the step that was looked at, if it has ended and was slow."""
        seconds = dict(self._progress.took).get(self._step)
        if seconds is None or self._asked_at is not None:
            return
        step, self._step = self._step, 0
        if seconds < self._slow_after or not self._num_looks:
            return
        text = f"step {step} took {seconds:.1f} s, {seconds / self._median:.1f} times the median"
        if not self._late:
            logger.info(f"{text}; no rank was late: a device or the network is slow")
            return
        (rank, times), *_ = self._late.most_common(1)
        seen = self._last_seen[rank]
        logger.warning(
            f"{text}: rank {rank} ({seen.host}) kept the others waiting in {times} of {self._num_looks} "
            f"looks, last at {seen.place}"
        )

    # ---- a rank that is stuck ----

    def _limit(self) -> float:
        """Return after how many seconds a rank is stuck: a third of the groups' timeout, at most."""
        comm = self._comm
        timeout = comm.train_timeout_seconds if self._progress.took else comm.init_timeout_seconds
        return min(comm.stuck_rank_seconds or float("inf"), timeout / 3)

    def _hangs(self, now: float) -> bool:
        """Return True, from time to time, while this rank enters no collective."""
        limit = self._limit()
        if now - self._checked_at < limit / _PARTS_OF_LIMIT or not self._comm.stuck_rank_seconds:
            return False
        self._checked_at, counts = now, own_state(self._progress).counts
        if counts != self._own_counts:
            self._own_counts, self._since, self._told = counts, {}, set()
            return False
        return True

    def _judge(self, now: float) -> None:
        """Count who is late, and tell who has been late in one place for too long."""
        self._asked_at, answers, self._answers = None, self._answers, {}
        late = late_among(answers)
        if self._step:
            self._num_looks += 1
            self._late.update(late)
            self._last_seen |= {rank: answers[rank] for rank in late}
        missing = [rank for rank in range(self._num_ranks) if rank not in answers]
        for rank in missing or late:
            counts = answers[rank].counts if rank in answers else None
            if rank not in self._since or self._since[rank][0] != counts:
                self._since[rank] = counts, now
                self._told.discard(rank)
            seconds = now - self._since[rank][1]
            # The first look came up to two parts after the rank stopped.
            is_over = seconds >= self._limit() * (1 - 2 / _PARTS_OF_LIMIT)
            if is_over and self._comm.stuck_rank_seconds and rank not in self._told:
                self._told.add(rank)
                self._tell(rank, seconds, answers.get(rank))

    def _tell(self, rank: int, seconds: float, state: State | None) -> None:
        since = f"for at least {seconds:.0f} s in step {self._progress.number}"
        if state is None:
            logger.warning(
                f"rank {rank} has not answered {since}: its process is stopped, or a call outside Python "
                "holds Python's lock"
            )
            return
        logger.warning(
            f"rank {rank} ({state.host}) has kept the others waiting {since}, at {state.place}"
        )
        self._ask(rank, True)
