"""Rank 0 names the rank that keeps the others waiting."""

import re
import time
from statistics import median

import pytest

from torchtitan.config.job_config import Comm
from torchtitan.distributed.processes import late_ranks
from torchtitan.distributed.processes.late_ranks import LateRanks, Progress, State


def state(place="a.py:1 (f)", **counts):
    return State(counts, "node", place, "x.py:3 (f)")


def test_rank_is_late_if_it_is_behind_in_a_group_and_ahead_in_none():
    def late(*states):
        return late_ranks.late_among(dict(enumerate(states)))

    assert late(state(a=5), state(a=4), state(a=5)) == [1]
    assert late(state(a=5), state(a=5)) == []
    # Rank 2 waits for rank 1 in group b, and rank 1 for rank 0 in group a: rank 0 is late.
    assert late(state(a=3), state(a=4, b=7), state(b=8)) == [0]
    # Ranks of two pipeline stages are in different groups, whose numbers mean nothing to each other.
    assert late(state(a=3), state(a=3), state(b=9), state(b=8)) == [3]


class Ranks:
    """Other ranks, which answer at once with `states`, and a clock that the test sets."""

    def __init__(self, monkeypatch, states, **settings):
        self.states, self.asked = states, []
        self.progress = Progress(None)
        monkeypatch.setattr(late_ranks, "own_state", lambda *_: self.states[0])
        self.late = LateRanks(Comm(**settings), self.progress, len(states), self.ask)
        self.start = time.monotonic()

    def ask(self):
        self.asked.append(self.progress.number)
        for rank, its_state in enumerate(self.states):
            if rank > 0 and its_state is not None:
                self.late.answers[rank] = its_state

    def run_step(self, number, seconds, turns_per_second=5):
        """A step of this length; the watch takes its turns meanwhile."""
        self.progress.number, self.progress.began_at = number, self.start
        for turn in range(int(seconds * turns_per_second) + 1):
            self.late.turn(self.start + turn / turns_per_second)
        self.start += seconds
        self.progress.took.append((number, seconds))
        self.late.turn(self.start)


@pytest.fixture(autouse=True)
def messages_of_the_package(caplog):
    caplog.set_level("INFO", "torchtitan")


def test_slowest_rank_of_a_step_of_three_medians_is_named(monkeypatch, caplog):
    ranks = Ranks(monkeypatch, [state(a=5), state(a=5), state("reader.py:9 (read)", a=4)])
    usual = [1.0, 1.2, 0.8, 1.0, 1.1]
    for number, seconds in enumerate([*usual, 2.9], 1):
        ranks.run_step(number, seconds)
    assert not caplog.messages
    ranks.run_step(7, 3.4)
    assert median([*usual, 2.9]) == 1.05
    (line,) = caplog.messages
    assert line == (
        "step 7 took 3.4 s, 3.2 times the median: rank 2 (node) kept the others waiting, "
        "last seen at reader.py:9 (read)"
    )


def test_steps_at_the_usual_speed_ask_nobody(monkeypatch):
    ranks = Ranks(monkeypatch, [state(a=n) for n in (2, 1)])
    for number in range(1, 40):
        ranks.states[0] = state(a=number)
        ranks.run_step(number, 0.9 + 0.01 * number)
    assert not ranks.asked


def test_stuck_rank_is_told_once_with_its_stack_before_the_time_out(monkeypatch, caplog):
    ranks = Ranks(monkeypatch, [state(a=5), state("disk.py:3 (write)", a=4)])
    ranks.run_step(1, 99)  # comm.init_timeout_seconds is 300, and 30 s are the default
    (told,) = caplog.messages
    found = re.fullmatch(
        r"rank 1 \(node\) has kept the others waiting for at least (\d+) s, at disk.py:3 \(write\); "
        r"its calls, innermost first:\nx.py:3 \(f\)",
        told,
    )
    assert found and 24 <= int(found[1]) <= 30, told


def test_rank_that_moves_on_slowly_is_not_stuck(monkeypatch, caplog):
    ranks = Ranks(monkeypatch, [state(a=5), state(a=4)], train_timeout_seconds=30)
    ranks.progress.took.append((1, 1.0))  # a third of 30 s counts
    for number in range(2, 8):
        ranks.states = [state(a=2 * number), state(a=2 * number - 1)]
        ranks.run_step(number, 5)
    assert not caplog.messages
    ranks.run_step(8, 16)
    assert "rank 1 (node) has kept the others waiting" in caplog.messages[0]


def test_rank_that_does_not_answer_is_told(monkeypatch, caplog):
    ranks = Ranks(monkeypatch, [state(a=5), state(a=5), None])
    ranks.run_step(1, 60)
    (line,) = caplog.messages
    assert line.startswith("rank 2 has not answered for 2") and "is stopped" in line


def test_zeros_turn_it_off(monkeypatch, caplog):
    settings = {"stuck_rank_seconds": 0, "slow_step_factor": 0}
    ranks = Ranks(monkeypatch, [state(a=5), state(a=4)], **settings)
    for number, seconds in enumerate([0.1] * 6 + [90], 1):
        ranks.run_step(number, seconds)
    assert not caplog.messages and not ranks.asked
