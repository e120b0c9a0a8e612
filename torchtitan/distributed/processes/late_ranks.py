"""Rank 0 names the rank that keeps the others waiting, after a slow step or before a collective times out.

A rank is late if in some process group it has entered fewer collectives than another rank, and in no group
more. Training only records when its steps begin and end. In a step that takes unusually long, a thread of
rank 0 asks the other ranks for their `State` over the connections of `Peers`.
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
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan.config.job_config import Comm
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger

SECONDS_BETWEEN_TURNS = 0.2
READING_THREAD = "data of the next step"
# Description of process groups whose collectives are not part of steps.
BACKGROUND = "beside training"
# Number of innermost calls to print.
_LONGEST_STACK = 15
# Fewest steps for a median of their durations.
_FEWEST_STEPS = 5


class Progress:
    """Which step a trainer is in. The trainer's main thread writes this, and the thread of `Peers` reads it.

    pipeline: the process group of a pipeline's stages. Its collectives are not compared, because gloo also
        counts sends and receives, and their number differs by rank.
    """

    def __init__(self, pipeline: dist.ProcessGroup | None = None) -> None:
        self.pipeline, self.number, self.began_at = pipeline, 0, time.monotonic()
        self.took: deque[tuple[int, float]] = deque(maxlen=64)  # (step, seconds) of the last steps

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.began_at = time.monotonic()
        self.number = number
        try:
            yield
        finally:
            self.took.append((number, time.monotonic() - self.began_at))


class State(NamedTuple):
    """Where a rank is. counts: process group -> collectives entered so far, and "step" -> the step's number.

    place: the innermost line outside torch and Python's library. stack: the innermost calls. Both describe
        the main thread. If the main thread waits for the data-reading thread, they describe that thread.
    """

    counts: dict[str, int]
    host: str = ""
    place: str = ""
    stack: str = ""


def own_state(progress: Progress | None) -> State:
    """Return the state of this process; an empty state without `progress`. Any thread may call this."""
    if progress is None:
        return State({})
    counts = {"step": progress.number}
    for group in set(torch_parts.world.pg_map) - {progress.pipeline}:
        # Some backends count no collectives.
        with contextlib.suppress(RuntimeError):
            if group.group_desc == BACKGROUND:
                continue
            counts[group.group_name] = torch_parts.collectives_so_far(group)
    threads, frames = {t.name: t.ident or 0 for t in threading.enumerate()}, sys._current_frames()
    if (main := frames.get(threading.main_thread().ident or 0)) is None:
        return State(counts, socket.gethostname())
    for frame in main, frames.get(threads.get(READING_THREAD, 0), main):
        calls = [
            (code := frame.f_code, f"{code.co_filename}:{line} ({code.co_name})")
            for frame, line in traceback.walk_stack(frame)
        ]
        code, place = next((x for x in calls if not _is_library(x[0].co_filename)), calls[-1])
        if code.co_name != "next_step":  # `next_step` waits for the reading thread
            break
    stack = "\n".join(line for _, line in calls[:_LONGEST_STACK])
    return State(counts, socket.gethostname(), os.sep.join(place.split(os.sep)[-2:]), stack)


def _is_library(path: str) -> bool:
    is_standard = path.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in path
    return is_standard or path.startswith((os.path.dirname(torch.__file__), "<"))


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
    """Rank 0's search for late ranks. `Peers` calls `turn` about every SECONDS_BETWEEN_TURNS.

    ask: a function that asks all other ranks for their states; `Peers` puts the states into `answers`.
    """

    def __init__(
        self, comm: Comm, progress: Progress, num_ranks: int, ask: Callable[[], None]
    ) -> None:
        self._comm, self._progress, self._num_ranks, self._ask = comm, progress, num_ranks, ask
        self.answers: dict[int, State] = {}
        self._step, self._median, self._slow_after = -1, inf, inf
        self._look_at = self._asked_at = 0.0
        # (rank, state) of the ranks that were late in this step.
        self._seen: list[tuple[int, State]] = []
        # Late rank -> (its counts, or {} if it does not answer; the time when rank 0 first asked and got
        # these counts, or inf after the warning).
        self._since: dict[int, tuple[dict[str, int], float]] = {}

    def turn(self, now: float) -> None:
        progress, took = self._progress, dict(self._progress.took)
        if (seconds := took.get(self._step, 0.0)) >= self._slow_after and self._seen:
            (rank, _), *_ = Counter(rank for rank, _ in self._seen).most_common(1)
            state, self._slow_after = dict(self._seen)[rank], inf
            logger.warning(
                f"step {self._step} took {seconds:.1f} s, {seconds / self._median:.1f} times the median: "
                f"rank {rank} ({state.host}) kept the others waiting, last seen at {state.place}"
            )
        timeout = self._comm.train_timeout_seconds if took else self._comm.init_timeout_seconds
        limit = min(self._comm.stuck_rank_seconds, timeout / 3) or inf
        if progress.number != self._step:
            self._step, self._seen, self._slow_after = progress.number, [], inf
            if len(took) >= _FEWEST_STEPS and self._comm.slow_step_factor:
                self._median = statistics.median(took.values())
                self._slow_after = max(self._comm.slow_step_factor * self._median, 1.0)
            self.answers, self._look_at = {}, progress.began_at + min(limit, self._slow_after) / 2
        if now >= self._look_at:
            self._look_at = now + min(limit / 6, 0.2 * (now - progress.began_at))
            if self.answers:
                self._judge(now, limit)
            self._asked_at, self.answers = now, {0: own_state(progress)}
            self._ask()

    def _judge(self, now: float, limit: float) -> None:
        """Record the late ranks, and warn of each rank that is late at one place for `limit` seconds."""
        late, before, self._since = late_among(self.answers), self._since, {}
        self._seen += [(rank, self.answers[rank]) for rank in late]
        for rank in {*range(self._num_ranks)} - self.answers.keys() | {*late}:
            state = self.answers.get(rank, State({}))
            counts, since = before.get(rank, (None, 0.0))
            since = since if counts == state.counts else self._asked_at
            self._since[rank] = state.counts, since
            # Less than `limit`, because the rank was late already before rank 0 first asked.
            if (seconds := now - since) < 0.8 * limit:
                continue
            self._since[rank] = state.counts, inf
            text = f"has not answered for {seconds:.0f} s: it is stopped, or a call outside Python hangs"
            if rank in self.answers:
                text = f"({state.host}) has kept the others waiting for at least {seconds:.0f} s, "
                text += f"at {state.place}; its calls, innermost first:\n{state.stack}"
            logger.warning(f"rank {rank} {text}")
