import json
import os
import subprocess
import sys


def run(*flags):
    return subprocess.run(
        [sys.executable, "-m", "torchtitan.rl.train", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_preset_runs_from_the_command_line(tmp_path):
    result = run(
        "--job.config_file=torchtitan/rl/train_configs/copy_cpu.toml",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=2",
        "--rl.num_prompts_per_step=2",
        "--rl.eval_samples=4",
        "--metrics.no-enable_tensorboard",
    )
    assert result.returncode == 0, result.stderr
    assert "step:  2/2" in result.stdout and "training completed" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]


def test_config_mistake_is_one_line_and_exit_code_2():
    result = run("--model.name=rl_toy", "--rl.num_samples_per_prompt=1")
    assert result.returncode == 2
    assert result.stderr.startswith("config error: rl.advantage.name")
    assert result.stderr.count("\n") == 1
