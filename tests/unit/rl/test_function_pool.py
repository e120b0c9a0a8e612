import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.rl.reward_functions import fancy
from torchtitan.experiments.rl_toy.tasks import CharTokenizer
from torchtitan.rl.function_pool import FunctionPool, Result
from torchtitan.rl.jsonl_task import JsonlTask

NAME = "tests.unit.rl.reward_functions:fancy"
TOKENIZER = CharTokenizer("abcdehngiorstx=.")


@pytest.fixture(scope="module")
def pool():
    pool = FunctionPool(NAME, 2, timeout_seconds=1.0)
    yield pool
    pool.close()


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a=", "answer": "a", "scale": 2},
        {"prompt": "b=", "answer": "b", "scale": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_hanging_and_dying_verifiers_cost_their_limit_and_not_the_run(pool, lines, caplog):
    task = JsonlTask(lines, fancy, TOKENIZER, reward_pool=pool)
    first, second = task.held_out(2)
    here = JsonlTask(lines, fancy, TOKENIZER)
    assert [here.grade(prompt, "b").reward for prompt in (first, second)] == [0, 5]
    pool.call_all([(("a", "a"), {"prompt": "a=", "row": first.row})])  # processes start
    started = time.monotonic()
    texts = {"a": (2, 0), "hang": (0, 1), "die": (0, 1), "exit": (0, 1), "x": (0, 0)}
    grades = task.grade_all([(first, text) for text in texts])
    assert time.monotonic() - started < 60  # two processes start again, which may be slow
    found = [(grade.reward, grade.scores["verifier_failed"]) for grade in grades]
    assert found == list(texts.values())
    assert "took longer than 1 s (rl.task.reward_timeout_seconds): reward 0" in caplog.text
    assert "process ended (exit code 3): reward 0" in caplog.text
    with pytest.raises(ValueError, match="KeyError: 'no such key'; .*correct the reward function"):
        task.grade_all([(first, "raise")])
    assert [grade.reward for grade in task.grade_all([(second, "b")] * 5)] == [5] * 5


def test_module_that_cannot_be_imported_is_named():
    before = set(multiprocessing.active_children())
    pool = FunctionPool("tests.unit.rl.no_such_module:f", 2, 1.0)
    with pytest.raises(ValueError, match="cannot be started: ModuleNotFoundError"):
        pool.call_all([(("a", "a"), {})] * 2)
    assert set(multiprocessing.active_children()) == before  # none is left


def test_process_that_dies_or_closes_its_pipe_is_a_failure():
    """Also in the middle of an answer, and while a child of the process holds the pipe open."""
    names = ["die_while_answering", "hide", "die_and_leave_the_pipe_open", "die"]
    pool = FunctionPool([f"tests.unit.rl.tool_functions:{n}" for n in names], 1, 600.0, convert=str)
    found = [result.failure for result in pool.call_all([((), {})] * 4, range(4))]
    ended = "the reward function's process ended "
    code = f"{ended}(exit code 3)"
    assert found == [code, f"{ended}(signal 9)", code, code]  # the one that lives is killed
    pool.close()


def test_what_a_call_has_started_ends_with_its_time(tmp_path):
    pool = FunctionPool("tests.unit.rl.tool_functions:leave_behind", 1, 2.0, convert=str)
    (result,) = pool.call_all([((str(tmp_path / "number"),), {})])
    assert "took longer than 2 s" in result.failure
    pool.close()
    wait_for_end((tmp_path / "number").read_text())


def wait_for_end(number: str) -> None:
    ends_by = time.monotonic() + 30
    while is_running(number):
        assert time.monotonic() < ends_by
        time.sleep(0.1)


def is_running(number: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()  # a zombie has ended
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_process_that_dies_between_calls_ends_with_what_it_left(tmp_path):
    pool = FunctionPool("tests.unit.rl.tool_functions:leave_and_return", 1, 60.0, convert=str)
    pool.call_all([((str(tmp_path / "first"),), {})])
    pool._workers[0].process.kill()
    pool._workers[0].process.join()
    pool.call_all([((str(tmp_path / "second"),), {})])
    wait_for_end((tmp_path / "first").read_text())
    pool.close()


@pytest.mark.parametrize(
    ("function", "end"),
    [
        ("leave_behind", "kill"),
        ("leave_and_return", "exit"),
        ("leave_and_return", "ignore SIGTERM"),
    ],
)
def test_processes_end_with_one_that_does_not_close_its_pool(function, end, tmp_path):
    """A generating rank ignores SIGTERM, and so do processes that it starts."""
    path = tmp_path / "number"
    code = f"""
import signal
from torchtitan.rl.function_pool import FunctionPool
if __name__ == "__main__":
    if {end == "ignore SIGTERM"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pool = FunctionPool("tests.unit.rl.tool_functions:{function}", 1, 300.0, convert=str)
    pool.call_all([(({str(path)!r},), {{}})])
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    if end == "kill":
        ends_by = time.monotonic() + 30
        while not (path.exists() and path.read_text()):
            assert trainer.poll() is None and time.monotonic() < ends_by
            time.sleep(0.05)
        trainer.kill()
    assert trainer.wait(60) == (-9 if end == "kill" else 0)
    wait_for_end(path.read_text())


def test_function_may_start_processes_of_its_own():
    pool = FunctionPool("tests.unit.rl.tool_functions:ask_another_process", 1, 60.0, convert=str)
    assert pool.call_all([((), {})]) == [Result(value="[3]")]
    pool.close()
