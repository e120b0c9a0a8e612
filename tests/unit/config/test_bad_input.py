"""Every mistake of a user gets one message that names the key, the value and the remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability import jobs
from torchtitan import train

pytestmark = pytest.mark.long


def run_main(monkeypatch, capsys, args: list[str], world_size: int = 1) -> tuple[int, str]:
    """Exit code and stderr of `python -m torchtitan.train ARGS` (up to building a trainer)."""
    monkeypatch.setattr(sys, "argv", ["train", *args])
    if world_size > 1:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", "0")

    def must_not_be_reached(_config):
        raise AssertionError("the config went through all checks")

    with pytest.raises(SystemExit) as stopped:
        train.main(must_not_be_reached)
    return stopped.value.code, capsys.readouterr().err


def write_toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return f"--job.config_file={path}"


TOML_MISTAKES = {
    "unparsable": ("[training]\nsteps = = 3\n", ["job.toml", "line 2"]),
    "unknown table": ("[trainign]\nsteps = 3\n", ["trainign", "training"]),
    "unknown key": ("[training]\nsetps = 3\n", ["setps", "steps"]),
    "wrong type": ('[training]\nsteps = "ten"\n', ["training", "steps", "ten", "int"]),
    "section as scalar": ("training = 3\n", ["training", "3"]),
    "bad choice": ('[compile]\nenable = "yes"\n', ["compile", "enable", "yes"]),
    "bad literal": (
        '[optimizer]\nimplementation = "slow"\n',
        ["implementation", "slow", "foreach"],
    ),
    "list given as text": ('[model]\nconverters = "x"\n', ["converters"]),
}


@pytest.mark.parametrize("name", TOML_MISTAKES)
def test_toml_mistake_exits_with_2_and_names_it(name, monkeypatch, capsys, tmp_path):
    text, expected = TOML_MISTAKES[name]
    code, errors = run_main(monkeypatch, capsys, [write_toml(tmp_path, text)])
    assert code == 2
    assert "Traceback" not in errors
    for word in expected:
        assert word in errors


# flags, what the message has to name, number of processes
FLAG_MISTAKES = {
    "missing TOML": (["--job.config_file=/nowhere/x.toml"], ["/nowhere/x.toml"], 1),
    "unknown flag": (["--training.setps=3"], ["setps"], 1),
    "bad choice": (["--checkpoint.async_mode=later"], ["async_mode", "later", "disabled"], 1),
    "zero sequence length": (["--training.seq_len=0"], ["training.seq_len", "0"], 1),
    "negative steps": (["--training.steps=-5"], ["training.steps", "-5"], 1),
    "zero batch": (["--training.local_batch_size=0"], ["training.local_batch_size", "0"], 1),
    "indivisible global batch": (
        ["--training.local_batch_size=4", "--training.global_batch_size=10"],
        ["training.global_batch_size", "10", "4", "8"],
        1,
    ),
    "degrees against world size": (
        ["--parallelism.data_parallel_shard_degree=3"],
        ["data_parallel_shard_degree", "3", "2"],
        2,
    ),
    "custom import": (["--experimental.custom_import=no.such"], ["custom_import", "no.such"], 1),
    "unknown model": (["--model.name=lama3"], ["lama3", "llama3"], 1),
    "unknown flavor": (["--model.flavor=8b"], ["8b", "8B"], 1),
    "unknown dataset": (["--training.dataset=c5"], ["c5", "c4"], 1),
    "unknown optimizer": (["--optimizer.name=SGDD"], ["SGDD", "AdamW"], 1),
    "unknown converter": (["--model.converters=float9"], ["float9", "quantize.linear.float8"], 1),
    "missing tokenizer": (["--model.hf_assets_path=/nowhere/tok"], ["/nowhere/tok"], 1),
    "heads against TP": (
        ["--parallelism.tensor_parallel_degree=3", "--parallelism.data_parallel_shard_degree=1"],
        ["tensor_parallel_degree", "3"],
        3,
    ),
    "dump folder not writable": (["--job.dump_folder=/proc/x"], ["job.dump_folder", "/proc/x"], 1),
    "missing data path": (
        ["--training.dataset=c4_test", "--training.dataset_path=/nowhere/data.jsonl"],
        ["training.dataset_path", "/nowhere/data.jsonl"],
        1,
    ),
    "sdpa with document mask": (
        ["--model.attn_type=sdpa", "--model.attn_mask_type=block_causal"],
        ["sdpa", "block_causal", "flex", "varlen"],
        1,
    ),
}


@pytest.mark.parametrize("name", FLAG_MISTAKES)
def test_flag_mistake_exits_with_2_and_names_it(name, monkeypatch, capsys):
    flags, expected, world_size = FLAG_MISTAKES[name]
    code, errors = run_main(monkeypatch, capsys, flags, world_size)
    assert code == 2
    assert "Traceback" not in errors
    for word in expected:
        assert word in errors


def test_simulated_ranks_are_checked_like_real_ones(monkeypatch, capsys):
    flags = ["--comm.mode=fake_backend", "--parallelism.data_parallel_shard_degree=3"]
    monkeypatch.setenv("NGPU", "8")
    code, errors = run_main(monkeypatch, capsys, flags)
    assert code == 2 and "8 processes and a product of 3" in errors
    monkeypatch.delenv("NGPU")
    code, errors = run_main(monkeypatch, capsys, flags)
    assert code == 2 and "NGPU" in errors and "''" in errors


TINY_RUN = [
    "--training.seq_len=16",
    "--training.local_batch_size=1",
    "--training.steps=2",
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_corrupt_jsonl_line_is_named_with_file_and_line(num_workers, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"\n{"text": "three"}\n')
    outcome = jobs.run(
        [
            *TINY_RUN,
            "--training.dataset=local",
            f"--training.dataset_path={path}",
            f"--training.dataloader.num_workers={num_workers}",
            f"--job.dump_folder={tmp_path}",
        ],
        tmp_path / "logs",
        timeout_seconds=60,
    )
    assert outcome.exit_codes == [1], outcome.output
    assert "data.jsonl, line 2" in outcome.output
    assert "Traceback" not in outcome.output


def test_torchrun_is_told_what_a_rank_with_hidden_output_failed_of(monkeypatch, capsys, tmp_path):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(sys, "argv", ["train", f"--job.dump_folder={tmp_path}"])

    def fails(error):
        def build_trainer(_config):
            raise error

        return build_trainer

    with pytest.raises(SystemExit):
        train.main(fails(ValueError("data.jsonl, line 7")))
    assert json.loads(report.read_text())["message"]["message"] == "error: data.jsonl, line 7"
    with pytest.raises(SystemExit):  # a fault of ours is told with its stack
        train.main(fails(KeyError("step")))
    assert "build_trainer" in json.loads(report.read_text())["message"]["message"]
    report.unlink()
    with pytest.raises(SystemExit, match="1"):  # that rank tells it
        train.main(fails(RuntimeError("Connection closed by peer [127.0.0.1]:8938")))
    assert not report.exists()


def test_checkpoint_step_that_is_not_there_is_an_error_not_a_fresh_start(tmp_path):
    outcome = jobs.run(
        [
            *TINY_RUN,
            "--training.dataset=python_docs",
            "--checkpoint.enable",
            "--checkpoint.load_step=7",
            f"--job.dump_folder={tmp_path}",
        ],
        tmp_path / "logs",
        timeout_seconds=60,
    )
    assert outcome.exit_codes == [2], outcome.output
    (error,) = (line for line in outcome.output.splitlines() if "checkpoint.load_step" in line)
    assert "7" in error
    assert "Traceback" not in outcome.output


def test_runs_as_one_process_without_torchruns_environment(tmp_path):
    result = subprocess.run(  # a process of its own, as a user starts it
        [sys.executable, "-m", "torchtitan.train", *TINY_RUN]
        + ["--training.dataset=python_docs", f"--job.dump_folder={tmp_path}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "step:  2" in result.stdout
