"""One job at a time uses a checkpoint folder."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.jobs import TINY_JOB
from torchtitan.tools.errors import RunError
from torchtitan.tools.folder_lock import LOCK_FILE, FolderLock

HOLD = """
import os, sys, time
from torchtitan.tools.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """A process that holds the lock of tmp_path; `child` is the id of its forked child."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    process.child = int(process.stdout.readline())
    yield process
    process.kill()
    os.kill(process.child, signal.SIGKILL)
    process.wait()


def is_refused(folder: Path) -> bool:
    code = f"from torchtitan.tools.folder_lock import FolderLock; FolderLock({str(folder)!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0 or "in use by process" in process.stderr, process.stderr
    return process.returncode != 0


def test_killed_owner_gives_the_folder_up_while_its_forked_child_lives(tmp_path, owner):
    with pytest.raises(RunError, match=f"in use by process {owner.pid} on .* since"):
        FolderLock(str(tmp_path))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    os.kill(owner.child, 0)  # is still there
    FolderLock(str(tmp_path)).release()


@pytest.mark.parametrize(
    "program", ["torchtitan.train", "torchtitan.rl.train", "torchtitan.rl.serve"]
)
def test_second_job_in_a_dump_folder_is_refused_before_it_touches_anything(
    program, tmp_path, owner, own_flavors, monkeypatch, capsys
):
    """A server's idle clients wait in files there, which a server removes at its start."""
    waiting = tmp_path / "waiting_models/rank-0/model.safetensors"
    waiting.parent.mkdir(parents=True)
    waiting.write_text("a client's adapters")
    before = sorted(tmp_path.rglob("*"))
    module = importlib.import_module(program)
    flags = ["--model.name=rl_toy", f"--job.dump_folder={tmp_path}", "--rl.task.name=copy"]
    if program == "torchtitan.train":
        flags = TINY_JOB + flags[1:2]
    monkeypatch.setattr(sys, "argv", [program, *flags])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 1
    assert f"{tmp_path} is in use by process {owner.pid}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_lock_lasts_until_its_last_holder_in_the_process_releases_it(tmp_path):
    first, second = FolderLock(str(tmp_path)), FolderLock(f"{tmp_path}/.")
    first.release()
    first.release()
    assert is_refused(tmp_path)
    second.release()
    assert not is_refused(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()


def test_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    FolderLock(str(tmp_path)).release()
    assert "cannot be locked (No locks available)" in caplog.text
