"""The recipe in examples/rl/word_problems: its data, its configs, and a few steps of all of it."""

import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from examples.rl.word_problems.make_data import MAX_EVENTS, problem, problems
from tests.unit.rl.toy import rows_of
from torchtitan.config import ConfigManager
from torchtitan.job import resolve_job
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.rewards import gsm8k

RECIPE = Path("examples/rl/word_problems")
ROW = '{"question": "1+1?", "prompt": "1+1?", "answer": "#### 2"}\n'


def run(command, **environment):
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def parsed(name, *flags):
    return ConfigManager(JobConfig).parse_args([f"--job.config_file={RECIPE / name}", *flags])


def test_worked_steps_lead_to_the_answer():
    rng = random.Random(1)
    for _ in range(300):
        row = problem(rng)
        *steps, last = row["answer"].split("\n")
        assert 1 <= len(steps) <= MAX_EVENTS
        total = int(row["question"].split()[2])  # "Ana has 7 apples. ..."
        for step in steps:
            left, result = step.split("=")
            assert left.startswith(str(total)) and eval(left) == int(result) >= 0
            total = int(result)
        assert last == f"#### {total}"
        assert gsm8k(row["answer"], row["answer"]) == 1.0


def test_problems_depend_on_the_seed_only_and_do_not_repeat():
    first, again, other = (list(islice(problems(seed), 500)) for seed in (0, 0, 1))
    assert first == again != other
    assert len({row["question"] for row in first}) == 500


def test_row_without_a_question_is_named(tmp_path):
    data, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    data.write_text(ROW + '{"answer": "2"}\n')
    render = "-m examples.rl.word_problems.render --template plain".split()
    result = run([sys.executable, *render, data, out])
    assert result.returncode == 2 and "in.jsonl, line 2: must be a JSON object" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("without_vllm", [False, True], ids=["vLLM", "no vLLM"])
@pytest.mark.parametrize("n_ranks_apart", [0, 8], ids=["one GPU", "two nodes"])
def test_config_for_gpus_is_a_job_that_can_start(
    n_ranks_apart, without_vllm, tmp_path, monkeypatch
):
    comment = (RECIPE / "qwen3_0.6b.toml").read_text().split("add these flags:\n#")[1]
    flags = comment.splitlines()[0].split() if without_vllm else []
    (data := tmp_path / "data.jsonl").write_text(ROW)
    flags += [f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={tmp_path}"]
    flags += [f"--rl.task.path={data}", f"--rl.task.eval_path={data}"]
    config = parsed("qwen3_0.6b.toml", *flags, f"--rl.generator.ranks={n_ranks_apart}")
    assert config.rl.generator.backend == ("local" if without_vllm else "vllm")
    config.checkpoint.initial_load_path = None  # a download
    monkeypatch.setenv("WORLD_SIZE", str(max(1, 2 * n_ranks_apart)))
    check_rl_config(config)
    resolve_job(config)


def test_command_for_two_nodes_sets_one_apart_for_generation(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.jsonl").write_text(ROW)
    # The script writes only relative to the folder above its own.
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    script = tmp_path / RECIPE / "run_qwen3.sh"
    variables = {"NNODES": "2", "MASTER": "node0:29500", "NGPU": "4", "DRY_RUN": "1"}
    variables |= {"PYTHON": sys.executable, "VENV": "none", "DATA": str(tmp_path)}
    result = run([script, "--training.steps=3"], **variables)
    assert result.returncode == 0, result.stderr
    assert "--nnodes=2 --nproc-per-node=4 " in result.stdout
    assert "-m torchtitan.rl.train --job.config_file=" in result.stdout
    assert "qwen3_0.6b.toml --rl.generator.ranks 4" in result.stdout
    assert result.stdout.rstrip().endswith("--training.steps=3")
    config = parsed("qwen3_0.6b.toml")
    for path in (config.rl.task.path, config.rl.task.eval_path):
        (row,) = rows_of(tmp_path / path)
        assert row["prompt"].startswith("<|im_start|>user\n1+1?")


@pytest.mark.slow
def test_recipe_runs_on_a_cpu_with_one_command(tmp_path):
    """A few steps of each part; that rewards rise is measured in docs/measured.md."""
    variables = {"PYTHON": sys.executable, "VENV": "none", "OMP_NUM_THREADS": "1"}
    flags = ["--training.steps=2", "--rl.num_prompts_per_step=2", "--rl.eval_samples=4"]
    command = [RECIPE / "run_cpu.sh", *flags, "--rl.log_samples=-1"]
    result = run(command, OUT=str(tmp_path), SFT_STEPS="2", **variables)
    assert result.returncode == 0, result.stderr + result.stdout
    folder = tmp_path / "seed_0/rl"
    rows = rows_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert {"eval/greedy_reward", "eval/sampled_reward"} <= rows[-1].keys()
    episodes = rows_of(folder / "episodes.jsonl")
    assert len(episodes) == 2 * 2 * parsed("rl_cpu.toml").rl.num_samples_per_prompt
    assert all("#### " in episode["expected_answer"] for episode in episodes)
