"""Sizes of a model from a job's config: [model.args] over a flavor, and model.hf_config."""

import pytest
import torch

from tests.tiny_hf import tiny_hf_config
from torchtitan.config import ConfigManager
from torchtitan.config.job_config import Job, JobConfig, Model, Training
from torchtitan.engine import TrainingEngine
from torchtitan.job import find_train_spec, resolve_job
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.errors import ConfigError

TOML = """
[model]
name = "deepseek_v3"
flavor = "debugmodel"
[model.args]
dim = 64
n_layers = 2
[model.args.moe_args]
num_experts = 4
"""


def args_of(config):
    return resolve_job(config, builds_data=False).train_spec.model_args[config.model.flavor]


def test_table_changes_fields_of_the_flavor_and_leaves_the_flavor_alone(tmp_path):
    (tmp_path / "job.toml").write_text(TOML)
    file = f"--job.config_file={tmp_path / 'job.toml'}"
    flavor = get_train_spec("deepseek_v3").model_args["debugmodel"]
    before = (flavor.dim, flavor.n_layers, flavor.moe_args.num_experts)
    args = args_of(ConfigManager().parse_args([file]))
    assert (args.dim, args.n_layers, args.moe_args.num_experts) == (64, 2, 4)
    assert args.moe_args.top_k == flavor.moe_args.top_k == 3
    assert (flavor.dim, flavor.n_layers, flavor.moe_args.num_experts) == before
    # A flag replaces the table, with or without braces.
    for flag in ("dim = 32, moe_args = {top_k = 2}", "{dim = 32, moe_args.top_k = 2}"):
        args = args_of(ConfigManager().parse_args([file, f"--model.args={flag}"]))
        assert (args.dim, args.n_layers, args.moe_args.top_k) == (32, flavor.n_layers, 2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dimm": 64}, r"'dimm' in \[model.args\] is unknown, did you mean 'dim'"),
        ({"dim": "64"}, r"\[model.args\] dim = '64': expected int, got str; the default is 256"),
        ({"dim": 0}, r"model.args.dim must be at least 1 and below 2\*\*24, got 0"),
        ({"n_kv_heads": 3}, r"must divide n_heads, got 3 with 16; the choices are 1, 2, 4"),
        ({"n_heads": 7}, r"n_heads must divide dim .*, got 7 with 256"),
        (
            {"rope_scaling_args": {"factor": 2.0}},
            r"'factor' in \[model.args.rope_sc.*\] is unknown",
        ),
        ({"rope_scaling_args": 3}, r"_args is a table of settings, got the single value 3"),
    ],
)
def test_refused_field_is_named(table, message):
    with pytest.raises(ConfigError, match=message):
        args_of(JobConfig(model=Model(args=table)))


def test_engine_has_the_sizes_of_a_hugging_face_config(tmp_path):
    tiny_hf_config("qwen3").save_pretrained(tmp_path)
    config = JobConfig(
        job=Job(dump_folder=str(tmp_path / "run")),
        model=Model(name="qwen3", hf_config=str(tmp_path), args={"n_layers": 1}),
        training=Training(seq_len=16, mixed_precision_param="float32"),
    )
    with TrainingEngine(config) as engine:
        (logits,) = engine.forward_step({"input": torch.zeros(1, 16, dtype=torch.int64)})
        assert logits.shape == (1, 16, 64)
        assert len(engine.model_parts[0].layers) == 1
    config.model.name = "llama3"
    with pytest.raises(ConfigError, match="describes a qwen3 model, got model.name = 'llama3'"):
        find_train_spec(config)
    config.model.hf_config = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="model.hf_config cannot be used: .*none cannot be read"):
        find_train_spec(config)
