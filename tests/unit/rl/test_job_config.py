import json

import pytest

from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig


def config_with(**values) -> JobConfig:
    """A config with keys set by their dotted names, dots written as double underscores."""
    config = JobConfig()
    for key, value in values.items():
        *path, name = key.split("__")
        section = config
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def test_defaults_are_on_policy_and_pass():
    config = JobConfig()
    check_rl_config(config)
    rl = config.rl
    assert (rl.sampling.temperature, rl.sampling.top_p, rl.sampling.top_k) == (1, 1, 0)
    assert rl.async_steps == 0


BAD_VALUES = [
    ({"rl__minibatches": 17}, "at most rl.num_prompts_per_step = 16, got 17"),
    (
        {"rl__redraws": 1, "rl__num_samples_per_prompt": 1, "rl__advantage__name": "none"},
        "rl.redraws = 1 compares completions of one prompt",
    ),
    ({"rl__overlong_tokens": 17}, "at most rl.sampling.max_tokens = 16, got 17"),
    ({"rl__num_samples_per_prompt": 1}, "set it to 2 or more, or rl.advantage.name to 'none'"),
    ({"rl__advantage__name": "none", "rl__advantage__std": True}, "rl.advantage.std divides"),
    ({"model__value_head": True}, "got model.value_head = True; set it to false"),
    ({"rl__loss__name": "grop"}, "rl.loss.name must be one of grpo, .* got 'grop'"),
    (
        {"rl__loss__agg_mode": "seq-mean-token-sum-norm"},
        "rl.loss.norm = 0.0 is read by .* which divides by it",
    ),
    ({"rl__loss__norm": 8.0}, "rl.loss.norm = 8.0 is read by"),
    ({"rl__loss__count_empty": True}, "rl.loss.count_empty is read by .* got 'token-mean'"),
    ({"rl__loss__dual_clip": 0.5}, "rl.loss.dual_clip must be above 1, or 0 to turn it off"),
    ({"rl__loss__max_token_mismatch": 0.0}, "rl.loss.max_token_mismatch must be above 0 nats"),
    (
        {"rl__loss__correction": "sequence", "parallelism__context_parallel_degree": 2},
        "which context parallelism splits",
    ),
    (
        {"rl__loss__name": "importance_sampling", "rl__loss__ratio_clip_low": 0.2},
        "rl.loss.ratio_clip_low is not read by",
    ),
    ({"rl__loss__ratio_clip_low": 0.2}, "not read by rl.loss.name = 'grpo', which reads clip_eps"),
    ({"rl__sampling__top_p": 0.9}, "rl.sampling.top_p must be 1.0 in training"),
    ({"rl__sampling__top_k": 20}, "rl.sampling.top_k must be 0 in training"),
    (
        {"rl__sampling__max_tokens": 2049},
        "rl.sampling.max_tokens must be at most the longest episode - 1 = 2048, got 2049",
    ),
    (
        {"rl__batch__seq_len": 4096},
        "rl.batch.seq_len must be at most training.seq_len = 2048, got 4096",
    ),
    (
        {"rl__batch__pad_multiple": 3},
        "rl.batch.pad_multiple must divide the row length, got 3 with 2048",
    ),
    (
        {"rl__batch__max_tokens_per_microbatch": 100},
        "rl.batch.seq_len, must be at most rl.batch.max_tokens_per_microbatch = 100, got 2048",
    ),
    (
        {"rl__batch__max_tokens_per_microbatch": 4096, "rl__batch__local_batch_size": 2},
        "got rl.batch.local_batch_size = 2; change one of the two",
    ),
    (
        {"rl__batch__skip_zero_advantage": True, "rl__loss__entropy_coef": 0.01},
        "rl.batch.skip_zero_advantage leaves out samples whose policy loss is 0",
    ),
    ({"rl__batch__packing": True}, "got model.attn_mask_type = None"),
    (
        {"rl__loss__name": "gspo", "parallelism__context_parallel_degree": 2},
        "which context parallelism splits",
    ),
    (
        {"rl__generator__backend": "vllm", "rl__weight_sync__mode": "reference"},
        "rl.generator.backend = 'vllm' has weights of its own",
    ),
    ({"rl__async_steps": 2, "rl__generator__rescore": True}, "got rl.async_steps = 2"),
    ({"rl__async_steps": 1, "rl__weight_sync__mode": "reference"}, "rl.async_steps = 1 draws"),
    ({"optimizer__early_step_in_backward": True}, "optimizer.early_step_in_backward = True; set"),
    (
        {"rl__generator__backend": "vllm", "rl__generator__rescore": True},
        "rl.generator.rescore would hide how far",
    ),
    (
        {"rl__generator__memory_share": 0.5},
        "memory_share = 0.5 has no effect with rl.generator.backend = 'local'",
    ),
    (
        {
            "rl__generator__backend": "vllm",
            "rl__generator__tensor_parallel_degree": 2,
            "rl__redraws": 1,
            "rl__async_steps": 1,
        },
        "have to exchange redraws and replies",
    ),
    (
        {"rl__generator__ranks": 1, "rl__weight_sync__mode": "reference"},
        "rl.generator.ranks = 1 generates on separate ranks",
    ),
    (
        {"rl__generator__ranks": 1, "checkpoint__create_seed_checkpoint": True},
        "needs separate ranks .* got checkpoint.create_seed_checkpoint = True",
    ),
    (
        {"rl__weight_sync__delta": True},
        "rl.weight_sync.delta sends .* got rl.generator.ranks = 0, weight_transfer = '' and adapters",
    ),
    ({"rl__loss__name": "cross_entropy"}, "reads no rewards"),
    ({"rl__task__name": "sums"}, "rl.task.name must be one of"),
    ({"rl__task__num_min": 3}, "rl.task.num_min must be at most rl.task.num_max = 2, got 3"),
    ({"rl__task__name": "sort", "rl__task__num_letters": 27}, "at most 26"),
    ({"rl__task__name": "jsonl"}, "rl.task.path must be a file"),
    ({"training__gradient_reduction": "mean"}, "got training.gradient_reduction = 'mean' and"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=[str(v) for v, _ in BAD_VALUES])
def test_bad_value_is_one_error_that_names_key_value_and_remedy(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_rl_config(config_with(**values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json.loads", "got 'json.loads': .*; write it like my_rewards:exact_match"),
        ("no_such_module:f", "no_such_module"),
        ("json:no_such_function", "no_such_function"),
        ("json:__name__", "it is a str"),
    ],
)
def test_reward_function_that_cannot_be_found_is_refused(tmp_path, name, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    values = {"rl__task__name": "jsonl", "rl__task__path": str(path)}
    with pytest.raises(ConfigError, match=message):
        check_rl_config(config_with(**values, rl__task__reward_fn=name))
    values["rl__task__reward_fn"] = "operator:eq"
    check_rl_config(config_with(**values))
    with pytest.raises(ConfigError, match="rl.task.eval_path must be a file .* got 'missing'"):
        check_rl_config(config_with(**values, rl__task__eval_path="missing"))


def test_rl_sections_are_read_from_toml_and_flags(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[rl]\nnum_prompts_per_step = 4\n[rl.loss]\nname = "dapo"\n')
    module = "--job.custom_config_module=torchtitan.rl.job_config"
    flags = [f"--job.config_file={path}", "--rl.loss.entropy_coef=0.02"]
    for manager, arguments in (
        (ConfigManager(JobConfig), flags),
        (ConfigManager(), [module, *flags]),
    ):
        config = manager.parse_args(arguments)
        assert config.rl.num_prompts_per_step == 4
        assert (config.rl.loss.name, config.rl.loss.entropy_coef) == ("dapo", 0.02)
