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
import torch.distributed as dist

from torchtitan.config.job_config import Comm
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger

SECONDS_BETWEEN_TURNS = 0.2
READING_THREAD = "data of the next step"
_LONGEST_STACK = 15  # innermost calls that are printed
_FEWEST_STEPS = 5  # for a median
_SHORTEST_SLOW_STEP = 1.0  # seconds
_SECONDS_TO_ANSWER = 1.0
_ALL, _MOST_RANKS_SHOWN = -1, 8
_PARTS_OF_LIMIT = 6  # a stuck rank is looked for this often before its time is over


class Progress:
    """Which step a trainer is in. Its main thread writes, the thread of `Peers` reads.

    pipeline: the group of a pipeline's stages. Gloo counts sends, of which stages make different numbers.
    """

    def __init__(self, pipeline: dist.ProcessGroup | None) -> None:
        self.pipeline = pipeline
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
    for group in set(torch_parts.world.pg_map) - {progress and progress.pipeline}:
        with contextlib.suppress(RuntimeError):  # not counted by this backend
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

    ask: asks a rank, or all ranks for None, for its state; True asks for the stack, too. The answers come
        to `take`.
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
        # The step that may be slow (0: none), the median of those before, when to look, and who was late.
        self._step, self._median, self._slow_after, self._look_after = 0, 0.0, 0.0, 0.0
        self._looks: list[dict[int, State]] = []
        # Stuck ranks: rank -> (its counts, None without an answer; since when).
        self._checked_at, self._own_counts = time.monotonic(), dict[str, int]()
        self._since: dict[int, tuple[dict[str, int] | None, float]] = {}
        self._told: set[int] = set()

    def take(self, rank: int, state: State) -> None:
        """Keep a rank's answer, or log the stack that it was asked for."""
        if state.stack:
            logger.warning(f"the stack of rank {rank}, innermost call last:\n{state.stack}")
        else:
            self._answers[rank] = state

    def turn(self, now: float) -> None:
        if self._asked_at is not None:
            if len(self._answers) < self._num_ranks and now - self._asked_at < _SECONDS_TO_ANSWER:
                return
            self._judge(now)
        self._end_slow_step()
        if self._is_slow(now) or self._hangs(now):
            self._asked_at, self._answers = now, {0: own_state(self._progress)}
            self._ask(None, False)

    def _is_slow(self, now: float) -> bool:
        """Return True at growing intervals from half the time after which this step counts as slow."""
        progress, factor = self._progress, self._comm.slow_step_factor
        started_at, took = progress.started_at, list(progress.took)
        if started_at is None or not factor or len(took) < _FEWEST_STEPS:
            return False
        seconds = now - started_at
        if progress.number != self._step and seconds >= _SHORTEST_SLOW_STEP / 2:
            self._step, self._looks = progress.number, []
            self._median = statistics.median(seconds for _, seconds in took)
            self._slow_after = max(factor * self._median, _SHORTEST_SLOW_STEP)
            self._look_after = self._slow_after / 2
        if progress.number != self._step or seconds < self._look_after:
            return False
        self._look_after = 1.2 * seconds
        return True

    def _end_slow_step(self) -> None:
        """Log the step that was looked at, if it has ended and was slow."""
        seconds = dict(self._progress.took).get(self._step)
        if seconds is None:
            return
        step, self._step = self._step, 0
        if seconds < self._slow_after or not self._looks:
            return
        text = f"step {step} took {seconds:.1f} s, {seconds / self._median:.1f} times the median"
        times = Counter(rank for late in self._looks for rank in late)
        if not times:
            logger.info(f"{text}; no rank was late: a device or the network is slow")
            return
        rank = max(times, key=times.__getitem__)
        seen = next(late[rank] for late in reversed(self._looks) if rank in late)
        logger.warning(
            f"{text}: rank {rank} ({seen.host}) kept the others waiting in {times[rank]} of "
            f"{len(self._looks)} looks, last at {seen.place}"
        )

    def _hangs(self, now: float) -> bool:
        """Return True, a few times within the limit, while this rank enters no collective."""
        if now - self._checked_at < self._limit() / _PARTS_OF_LIMIT:
            return False
        self._checked_at, counts = now, own_state(self._progress).counts
        if counts != self._own_counts:
            self._own_counts, self._since, self._told = counts, {}, set()
            return False
        return True

    def _limit(self) -> float:
        """Return after how many seconds a rank is stuck; inf for never."""
        comm = self._comm
        timeout = comm.train_timeout_seconds if self._progress.took else comm.init_timeout_seconds
        return min(comm.stuck_rank_seconds, timeout / 3) or float("inf")

    def _judge(self, now: float) -> None:
        """Note who is late, and tell who has been late in one place for too long."""
        self._asked_at, answers, self._answers = None, self._answers, {}
        late = late_among(answers)
        if self._step:
            self._looks.append({rank: answers[rank] for rank in late})
        missing = [rank for rank in range(self._num_ranks) if rank not in answers]
        suspects = missing or late
        if (
            not suspects
            and self._step
            and now - (self._progress.started_at or now) > self._slow_after
        ):
            suspects = [_ALL]
        for rank in suspects:
            counts = answers[rank].counts if rank in answers else None
            if rank not in self._since or self._since[rank][0] != counts:
                self._since[rank] = counts, now
                self._told.discard(rank)
            seconds = now - self._since[rank][1]
            # The first look came up to two parts after the rank stopped.
            if rank not in self._told and seconds >= self._limit() * (1 - 2 / _PARTS_OF_LIMIT):
                self._told.add(rank)
                self._tell(rank, answers, f"{seconds:.0f} s in step {self._progress.number}")

    def _tell(self, rank: int, answers: dict[int, State], since: str) -> None:
        if rank == _ALL:
            places = [f"rank {rank} ({x.host}) at {x.place}" for rank, x in answers.items()]
            text = f"no rank has entered a collective for at least {since}"
            logger.warning(f"{text}: {'; '.join(places[:_MOST_RANKS_SHOWN])}")
        elif rank not in answers:
            text = "its process is stopped, or a call outside Python holds Python's lock"
            logger.warning(f"rank {rank} has not answered for at least {since}: {text}")
        else:
            text = f"has kept the others waiting for at least {since}, at {answers[rank].place}"
            logger.warning(f"rank {rank} ({answers[rank].host}) {text}")
            self._ask(rank, True)
