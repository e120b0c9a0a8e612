"""Requests to end a run: their sources, the ranks' agreement, the time reserved for the save."""

import os
import signal
import time

import pytest

from torchtitan.config import JobConfig
from torchtitan.distributed.processes.stop import StopRequest
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.signals import SIGNALS


def request(time_limit_minutes=0.0, enable=True, started_now=True) -> StopRequest:
    config = JobConfig()
    config.checkpoint.enable = enable
    config.training.time_limit_minutes = time_limit_minutes
    stop = StopRequest(config)
    if started_now:
        stop._deadline = time.monotonic() + 60 * time_limit_minutes
    return stop


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.05)  # until the thread has read it


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_answered_and_handlers_are_put_back(number):
    # Shells start what runs in the background with SIGINT ignored, which is respected.
    of_this_process = signal.signal(number, signal.SIG_DFL)
    try:
        with request() as stop:
            assert stop.answer() is None
            send(number)
            assert stop.answer() == f"{number.name} came to rank 0" == stop.reason
        assert signal.getsignal(number) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(number, of_this_process)


HEARD = []


@pytest.mark.parametrize(
    "number, handler",
    [
        (signal.SIGUSR2, lambda *_: HEARD.append(1)),
        (signal.SIGHUP, signal.SIG_IGN),  # as under nohup
    ],
)
def test_handlers_of_the_process_itself_are_left_alone(number, handler):
    HEARD.clear()
    before = signal.signal(number, handler)
    try:
        with request() as stop:
            send(number)
            assert stop.answer() is None and len(HEARD) == (handler is not signal.SIG_IGN)
    finally:
        signal.signal(number, before)


def test_signal_to_a_forked_child_is_the_childs():
    with request() as stop:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b".")
            time.sleep(10)
            os._exit(0)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.05)
        assert stop.answer() is None


def answers_of_rank(rank_with_signal):
    found = []
    with request() as stop:
        for step in range(4):
            stop.ask()
            found.append(stop.answer())
            if step == 1 and int(os.environ["RANK"]) == rank_with_signal:
                send(signal.SIGTERM)
    return found


def test_all_ranks_get_the_same_answer_at_the_same_step():
    for found in run_ranks(answers_of_rank, 3, 2):
        assert found == [None, None, *["SIGTERM came to rank 2"] * 2]


def test_time_limit_keeps_a_step_and_a_save_free():
    stop = request(time_limit_minutes=100)
    now = time.monotonic()
    stop._longest_step = 30.0
    assert not stop._is_time_up(now + 6000 - 30 - 60 - 1)  # a minute for the save
    assert stop._is_time_up(now + 6000 - 30 - 60 + 1)
    stop.saved(100)
    stop.saved(1)
    assert not stop._is_time_up(now + 6000 - 30 - 150 - 1)
    assert stop._is_time_up(now + 6000 - 30 - 150 + 1)
    assert not request()._is_time_up(now + 1e9)


def test_time_limit_counts_from_the_start_of_the_process():
    stop = request(time_limit_minutes=1, started_now=False)
    age = time.monotonic() + 60 - stop._deadline
    assert 0.1 < age < 24 * 3600  # torch was imported meanwhile
