"""Every shipped TOML file is a job that the checks let through."""

import math
from pathlib import Path

import pytest

from torchtitan.config import ConfigManager
from torchtitan.job import resolve_job
from torchtitan.models import module_paths

pytestmark = pytest.mark.long

PRESETS = sorted(Path("torchtitan/models").glob("*/train_configs/*.toml"))
DEGREES = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_preset_is_a_job_that_can_start(path, monkeypatch, tmp_path):
    config = ConfigManager().parse_args(
        [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}"]
    )
    # Tokenizers of large models are downloaded first.
    if not Path(config.model.hf_assets_path).is_dir():
        assert config.model.hf_assets_path.startswith("./assets/hf/")
        config.model.hf_assets_path = str(tmp_path)
    degrees = [getattr(config.parallelism, f"{name}_degree") for name in DEGREES]
    shards = max(2, config.parallelism.expert_parallel_degree)
    monkeypatch.setenv("WORLD_SIZE", str(shards * math.prod(degrees)))
    resolve_job(config)


def test_every_family_has_a_debug_preset():
    folders = {name for name, path in module_paths.items() if ".families." not in path}
    assert folders == {path.parts[-3] for path in PRESETS if path.stem == "debug_model"}
