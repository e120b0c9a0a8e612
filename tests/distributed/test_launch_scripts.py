"""Printed jobs: the commands that they run, and the launcher of several ranks on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.reliability import jobs
from tests.unit.cluster.printed import printed
from torchtitan.tools import launch

TIMEOUT_SECONDS = 180
JOB = jobs.flags_in("""
    training.dataset=python_docs training.steps=1000 training.seq_len=32 training.local_batch_size=1
    training.mixed_precision_param=float32 activation_checkpoint.mode=none metrics.log_freq=1
    metrics.enable_jsonl checkpoint.enable checkpoint.interval=1000
""")


def environment(**others):
    return os.environ | {"PYTHON": sys.executable, "VENV": "none", "OMP_NUM_THREADS": "1"} | others


def wait_until(is_true, *processes):
    """The processes have to live until then."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_true():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.05)


CONFIG = "torchtitan/models/llama3/train_configs/python_docs.toml"


def written(engine, path, *flags):
    """Write what `torchtitan launch` prints for a job on CPUs to an executable file."""
    options = (f"--config={CONFIG}", "--gpus-per-node=0", "--cpus=1")
    path.write_text(printed(engine, *options, *flags))
    path.chmod(0o755)
    return path


# Slurm's environment of a batch script; here srun has one task, and passes signals on.
SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
trap 'kill -USR2 $!' USR2
wait $! || status=$?
if [ "${status:-0}" -gt 128 ]; then wait $!; else exit "${status:-0}"; fi
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
  "show hostnames") echo localhost ;;
  "show job") echo "JobId=17 ExcNodeList=n7 Other=1" ;;
  *) echo "$@" >> "$CALLS" ;;
esac
"""


def slurm_environment(folder, **others):
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "CALLS": str(folder / "calls"),
    }
    return environment(**variables, **others)


def in_project(folder):
    """Return a working folder like the project's, for the script's output."""
    for name in ("torchtitan", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(name).resolve())
    return folder


def test_slurm_job_saves_and_is_queued_again_before_its_time_limit(tmp_path):
    flags = ["--nodes=1", *JOB, f"--job.dump_folder={tmp_path / 'out'}"]
    process = subprocess.Popen(
        [written("slurm", tmp_path / "job.sh", *flags)],
        cwd=in_project(tmp_path),
        env=slurm_environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    out = tmp_path / "out"
    try:
        wait_until(lambda: len(jobs.logged_steps(out)) >= 2, process)
        process.send_signal(signal.SIGUSR2)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.terminate()
    assert process.returncode == 0
    assert "ended with exit code 0; queueing the job again" in output
    assert (tmp_path / "calls").read_text() == "requeue 17\n"
    (saved,) = (out / "checkpoint").glob("step-*")
    last, _ = jobs.logged_steps(out)[-1]
    assert saved.name == f"step-{last}" and last < 1000


def with_python(folder, commands):
    """Return a job's script in which these commands stand for Python."""
    python = folder / "python"
    python.write_text(f"#!/usr/bin/env bash\n{commands}\n")
    python.chmod(0o755)
    script = written("slurm", folder / "job.sh", "--nodes=1", *JOB)
    script.write_text(script.read_text().replace(sys.executable, str(python)))
    return script


@pytest.mark.parametrize(
    ("exit_code", "attempt", "calls"),
    [(0, "3", None), (1, "3", "requeue 17\n"), (1, "10", None), (2, "0", None)],
)
def test_slurm_job_is_queued_again_after_a_failure_but_not_forever(
    exit_code, attempt, calls, tmp_path
):
    env = slurm_environment(tmp_path) | {"SLURM_RESTART_COUNT": attempt}
    script = with_python(tmp_path, f"exit {exit_code}")
    done = subprocess.run([script], cwd=tmp_path, env=env)
    assert done.returncode == (0 if calls else exit_code)
    path = tmp_path / "calls"
    assert (path.read_text() if path.exists() else None) == calls


def test_node_whose_rank_was_killed_is_left_out_of_the_next_attempt(tmp_path):
    line = "error: rank 1 ends because rank 0 ended without a message; if its output has"
    script = with_python(tmp_path, f"echo '{line}' >outputs/logs/17/0/1.log\nexit 1")
    subprocess.run([script], cwd=tmp_path, env=slurm_environment(tmp_path), check=True)
    expected = "requeue 17\nupdate JobId=17 ExcNodeList=localhost,n7\n"
    assert (tmp_path / "calls").read_text() == expected


def test_slurm_script_without_nodes_says_so(tmp_path):
    env = slurm_environment(tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    script = written("slurm", tmp_path / "job.sh", "--nodes=1", *JOB)
    done = subprocess.run([script], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "scontrol names 0 nodes of 'localhost', and the job has 1" in done.stderr


# ---- several ranks on one machine: Ctrl-C, and the message of a failure ----


def start_in_terminal(command, tmp_path, **variables):
    """Start the command in a process group of its own, as a shell does; its output goes to a file."""
    with open(tmp_path / "output", "w") as output:
        return subprocess.Popen(
            command,
            env=environment(**variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
            # A shell's background job, such as this test run, ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def test_ctrl_c_ends_the_launcher_as_its_ranks_end(tmp_path):
    # Two ranks that end with code 0 some time after SIGINT; nothing there loads torch.
    rank = f"trap 'sleep 1; echo saved; exit 0' INT; touch {tmp_path}/$RANK; while :; do sleep .1; done"
    launcher = [sys.executable, "-m", "torchtitan.tools.launch", "--nproc-per-node=2"]
    process = start_in_terminal(
        [*launcher, "--rdzv-endpoint=localhost:0", "--no-python", "bash", "-c", rank], tmp_path
    )
    try:
        wait_until(lambda: all((tmp_path / n).exists() for n in "01"), process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_SECONDS) == 0
    finally:
        process.kill()
    assert (tmp_path / "output").read_text() == "saved\nsaved\n"


@pytest.mark.parametrize(
    ("exit_code", "message", "passed_on", "last_line", "code"),
    [
        (2, "config error: no such key", [], "config error: no such key", 2),
        (1, "Traceback (most ...\nTypeError: no int", [], "error: rank 3: TypeError: no int", 1),
        (-9, None, [], "error: rank 3 was ended by SIGKILL; if nobody sent the signal, look", 137),
        (1, "error: disk full", [signal.SIGINT], "error: disk full", 1),
        (130, None, [signal.SIGINT], "interrupted by SIGINT; what was not saved is lost", 130),
        (-15, None, [signal.SIGTERM], "interrupted by SIGTERM; what was not saved is lost", 143),
    ],
)
def test_launcher_ends_with_the_sentence_and_code_of_the_first_failure(
    exit_code, message, passed_on, last_line, code, monkeypatch, capsys, tmp_path
):
    error_file = tmp_path / "error.json"
    if message is not None:
        details = {"message": message, "extraInfo": {"timestamp": "1"}}
        error_file.write_text(json.dumps({"message": details}))
    failure = ProcessFailure(0, 1234, exit_code, str(error_file))

    def fail(_arguments):
        raise ChildFailedError("torchtitan.train", {3: failure})

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # which the launcher sets
    monkeypatch.setattr("torch.distributed.run.main", fail)
    monkeypatch.setattr(launch, "SIGNALS", ())
    monkeypatch.setattr(launch, "_passed_on", passed_on)
    with pytest.raises(SystemExit) as exit_:
        launch.main([])
    assert exit_.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(last_line)
    assert (len(lines) == 1) == last_line.startswith("interrupted")  # else below torchrun's report
    assert "Traceback" not in lines[0]


def test_launcher_names_a_port_that_another_program_has(monkeypatch):
    monkeypatch.setattr(launch, "SIGNALS", ())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.devnull)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        with pytest.raises(SystemExit, match=f"^error: .*port: {port}.* set a free --master-port"):
            launch.main([*options, "-m", "torchtitan.train"])
