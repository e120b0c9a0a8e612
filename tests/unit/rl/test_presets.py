"""Every shipped TOML file is a job that passes the checks, and the examples fit together."""

from pathlib import Path

import pytest

from torchtitan.config import ConfigManager
from torchtitan.job import resolve_job
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig

CONFIGS = Path("torchtitan/rl/train_configs")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_preset_is_a_job_that_can_start(path, tmp_path):
    config = ConfigManager(JobConfig).parse_args(
        [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}"]
    )
    config.checkpoint.initial_load_path = None  # made by the pre-training run
    resolve_job(config)
    if not path.stem.endswith("pretrain"):
        check_rl_config(config)


def test_rl_starts_from_where_pretraining_ends():
    pretraining, rl = (
        ConfigManager(JobConfig).parse_args([f"--job.config_file={CONFIGS / name}"])
        for name in ("sum_digits_pretrain.toml", "sum_digits_cpu.toml")
    )
    step = pretraining.training.steps
    assert rl.checkpoint.initial_load_path == (
        f"{pretraining.job.dump_folder}/checkpoint/step-{step}"
    )
    assert f"step-{step}" in Path("scripts/run_rl.sh").read_text()
