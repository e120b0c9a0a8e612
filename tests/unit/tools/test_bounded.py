"""Calls in a process of their own end at the bounds, whatever they do, and never hang the caller."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan.tools import bounded

MATCHES = "torchtitan.tools.bounded:first_matches"


def test_call_returns_what_the_function_returns_and_an_error_is_told():
    assert bounded.call("operator:add", 2, 2) == 4
    with pytest.raises(bounded.BoundedCallError, match="^division by zero$"):
        bounded.call("operator:truediv", 1, 0)
    with pytest.raises(bounded.BoundedCallError, match="^SystemExit$"):
        bounded.call("sys:exit")


def test_call_that_takes_too_long_ends_and_the_next_one_is_answered(monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    for function, *arguments in (
        (MATCHES, [r"(a+)+b", "a*"], ["a" * 60]),
        (MATCHES, [".*" * 12 + "x"], ["a" * 300]),
        ("operator:pow", 10, 10**9),
        ("operator:mul", "a", 2 * 10**9),
        ("itertools:permutations", range(10**9)),
    ):
        with pytest.raises(bounded.OutOfBoundsError, match=r"^it takes more than (0\.5 s|1 GiB)"):
            bounded.call(function, *arguments)
        found = bounded.call(MATCHES, ["b", "a.", ".*"], ["aa", "b", "", "\n"])
        assert found == ["a.", "b", ".*", None]


def test_process_that_is_killed_is_replaced_and_a_call_that_kills_it_is_told():
    process = bounded.call("os:getpid")
    os.kill(process, signal.SIGKILL)
    assert bounded.call("os:getpid") != process
    with pytest.raises(bounded.OutOfBoundsError, match="^its process ended with signal 6$"):
        bounded.call("os:abort")


def test_interrupted_call_answers_no_other_one(monkeypatch):
    assert bounded.call("operator:add", 1, 1) == 2
    pipe = bounded._processes[os.getpid()]._pipe
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    try:
        with monkeypatch.context() as patched:
            patched.setattr(type(pipe), "recv", lambda _: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                bounded.call("operator:add", 2, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert bounded.call("operator:add", 3, 3) == 6


def test_threads_and_forks_get_their_own_answers():
    def sums(i):
        return [bounded.call("operator:add", i, n) - n for n in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(sums, range(4))] == [[i] * 20 for i in range(4)]

    started = time.monotonic()
    if (holder := os.fork()) == 0:  # holds the pipe, as a data worker does
        time.sleep(600)
    bounded._processes[os.getpid()]._end()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert time.monotonic() - started < 300

    parent, (read, write) = bounded.call("os:getpid"), os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(bounded.call("os:getpid")).encode())
        bounded._processes[os.getpid()]._end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(read, 99)) not in (parent, child)
    assert bounded.call("os:getpid") == parent


def test_process_ends_with_a_killed_caller():
    code = (
        "import os; from torchtitan.tools import bounded; "
        "print(bounded.call('os:getpid'), flush=True); os.kill(os.getpid(), 9)"
    )
    # The output ends when the process, which inherited it, has ended.
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert outcome.returncode == -signal.SIGKILL and int(outcome.stdout)
