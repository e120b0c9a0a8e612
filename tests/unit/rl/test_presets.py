"""Every shipped TOML file is a job that passes the checks."""

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
