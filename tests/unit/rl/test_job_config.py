from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.job import resolve_job
from torchtitan.rl.checks import check_rl_config, check_server_config
from torchtitan.rl.job_config import JobConfig


def config_with(values: dict[str, Any]) -> JobConfig:
    """A config with keys set by their dotted names; the section `rl` may be left out."""
    config = JobConfig()
    for key, value in values.items():
        *path, name = key.split(".")
        section: Any = config.rl if hasattr(config.rl, (*path, name)[0]) else config
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


GAE = {"advantage.name": "gae"}
JSONL = {"task.name": "jsonl", "task.path": __file__, "task.reward_fn": "operator:eq"}
TOOLS = JSONL | {"task.tools": ["torchtitan.rl.tools:calculator"]}
EXACT, SHARED = {"generator.exact": True}, {"batch.share_prefixes": True}
OF_DOCUMENTS = {"model.attn_mask_type": "position_block_causal", "batch.packing": True}
VLLM, FLIES = {"generator.backend": "vllm"}, {"generator.in_flight": True}
OPENAI = {"generator.backend": "openai", "generator.url": "http://a", "generator.model": "m"}
RELOADS = OPENAI | {"generator.reload_url": "http://a/r"}
LORA = {"model.converters": ["lora"], "generator.adapters": True}
TO_SERVER = OPENAI | LORA
SPLIT, SKIPS = {"parallelism.context_parallel_degree": 2}, {"batch.skip_zero_advantage": True}
TOKENS, SEED = {"batch.max_tokens_per_microbatch": 4096}, "checkpoint.create_seed_checkpoint"
SPLIT_COPY = {"generator.tensor_parallel_degree": 2, "redraws": 1, "async_steps": 1}
GOOD = [{}, RELOADS, TO_SERVER, JSONL, GAE, FLIES | {"async_steps": 1}]

BAD_VALUES = [
    ({"minibatches": 17}, "at most rl.num_prompts_per_step = 16, got 17"),
    ({"num_samples_per_prompt": 1}, "set it to 2 or more, or rl.advantage.name to 'none'"),
    (GAE | {"redraws": 1, "num_samples_per_prompt": 1}, "rl.redraws = 1 compares completions"),
    ({"overlong_tokens": 17}, "at most rl.sampling.max_tokens = 16, got 17"),
    ({"advantage.name": "none", "advantage.std": True}, "rl.advantage.std divides"),
    ({"model.value_head": True}, "got model.value_head = True; set it to false"),
    ({"optimizer.early_step_in_backward": True}, "early_step_in_backward = True; set them"),
    ({"training.gradient_reduction": "mean"}, "got training.gradient_reduction = 'mean' and"),
    # Losses and batches.
    (SPLIT | {"loss.name": "gspo"}, "which context parallelism splits"),
    (SKIPS | {"loss.entropy_coef": 0.01}, "leaves out samples whose policy loss is 0"),
    (TOKENS | {"batch.local_batch_size": 2}, "got rl.batch.local_batch_size = 2; change one"),
    ({"loss.name": "grop"}, "rl.loss.name must be one of grpo, .* got 'grop'"),
    ({"loss.name": "cross_entropy"}, "reads no rewards"),
    ({"loss.agg_mode": "seq-mean-token-sum-norm"}, "rl.loss.norm = 0.0 is read by .* divides by"),
    ({"loss.norm": 8.0}, "rl.loss.norm = 8.0 is read by"),
    ({"loss.count_empty": True}, "rl.loss.count_empty is read by .* got 'token-mean'"),
    ({"loss.dual_clip": 0.5}, "rl.loss.dual_clip must be above 1, or 0 to turn it off"),
    ({"loss.max_token_mismatch": 0.0}, "rl.loss.max_token_mismatch must be above 0 nats"),
    ({"loss.ratio_clip_low": 0.2}, "not read by rl.loss.name = 'grpo', which reads clip_eps"),
    ({"batch.seq_len": 4096}, "at most training.seq_len = 2048, got 4096"),
    ({"batch.pad_multiple": 3}, "pad_multiple must divide the row length, got 3 with 2048"),
    ({"batch.max_tokens_per_microbatch": 9}, "max_tokens_per_microbatch = 9, got 2048; lower it"),
    ({"batch.packing": True}, "got model.attn_mask_type = None"),
    (SHARED | {"model.attn_type": "flex"}, "got rl.batch.packing = False"),
    (OF_DOCUMENTS | SHARED | EXACT, "rl.generator.exact .*got rl.batch.share_prefixes = True"),
    # Sampling and tasks.
    ({"sampling.top_p": 0.9}, "rl.sampling.top_p must be 1.0 in training"),
    ({"sampling.max_tokens": 2049}, "at most the longest episode - 1 = 2048, got 2049"),
    (VLLM | {"sampling.max_tokens": 2048}, "at most the longest episode - 1 = 2047, got 2048"),
    ({"task.name": "sums"}, "rl.task.name must be one of"),
    ({"task.num_min": 3}, "rl.task.num_min must be at most rl.task.num_max = 2, got 3"),
    ({"task.name": "sort", "task.num_letters": 27}, "at most 26"),
    ({"task.name": "jsonl"}, "rl.task.path must be a file"),
    (JSONL | {"task.chat_template": "a.jinja"}, "must be a file with a Jinja template, got 'a.j"),
    (JSONL | {"task.chat_variables": "[1]"}, r"must be a JSON object, got '\[1\]'"),
    (JSONL | {"task.tools": ["nowhere:f"]}, "rl.task.tools names a function to import"),
    (TOOLS, "another turn to read them, got rl.task.max_turns = 1; raise it"),
    (JSONL | {"task.reward_fn": "json.loads"}, "got 'json.loads': .*; write it like my_rewards:"),
    (JSONL | {"task.reward_fn": "json:no_such_function"}, "no_such_function"),
    # The critic.
    (GAE | {"batch.skip_zero_advantage": True}, "learns from all .*skip_zero_advantage = True"),
    (GAE | {"critic.warmup_steps": 10_000}, "at most training.steps - 1 = 9999, got 10000"),
    (GAE | {"critic.initial_load_path": "no"}, "must be a folder of weights, got 'no'"),
    ({"critic.lr": 1.0}, "rl.critic.lr = 1.0 has no effect with .*'group_mean'; set that to 'gae'"),
    (GAE | {"advantage.lam": -0.1}, "rl.advantage.lam must be at least 0, got -0.1"),
    # The generator and its weights.
    ({"async_steps": 1, "weight_sync.mode": "reference"}, "rl.async_steps = 1 draws"),
    ({"generator.ranks": 1, "weight_sync.mode": "reference"}, "ranks = 1 generates on separate"),
    (VLLM | {"generator.rescore": True}, "rl.generator.rescore would hide how far"),
    ({"weight_sync.delta": True}, "got rl.generator.ranks = 0, weight_transfer = '' and adapters"),
    ({"generator.ranks": 1, SEED: True}, "needs separate ranks .* got checkpoint.create_seed"),
    (VLLM | SPLIT_COPY, "have to exchange redraws and replies"),
    (VLLM | FLIES | {"async_steps": 1}, "that draws during.* = 'vllm' and rl.async_steps = 1; set"),
    (VLLM | EXACT, "got rl.generator.backend = 'vllm'; change one"),
    (EXACT | {"parallelism.tensor_parallel_degree": 2}, "tensor_parallel_degree = 2; change one"),
    (OPENAI | {"generator.reload_url": "a:80"}, "reload_url must be an .* got 'a:80'"),
    (OPENAI | {"generator.url": "http://a,b:80"}, "url must be an address like .* got 'b:80'"),
    (RELOADS | {"generator.url": "http://a, http://b"}, "names 2 servers.*got reload_url = 'http"),
    (OPENAI | {"generator.model": ""}, "rl.generator.model must be the model's name"),
    (RELOADS | {"generator.weight_transfer": "gloo"}, "sends .* got rl.generator.reload_url"),
    (OPENAI | {"generator.ranks": 2}, "must not take weights while .* rl.generator.ranks = 2"),
    ({"generator.url": "a"}, "url = 'a' has no effect .*; set that to 'openai'"),
    (TO_SERVER | {"model.converters": []}, "sends the adapters of the converter 'lora', got"),
    (TO_SERVER | {"lora.rank_pattern": {"wq": 2}}, "one LoRA rank and scale .* lora.rank_patt"),
    (LORA, "files of adapters .*backend = 'local'"),
    (LORA | VLLM, "vLLM read the base model from .*; train from that"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=[str(v) for v, _ in BAD_VALUES])
def test_bad_value_is_one_error_that_names_key_value_and_remedy(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_rl_config(config_with(values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_settings_of_which_the_bad_ones_are_made_pass(values):
    check_rl_config(config_with(values))


@pytest.mark.parametrize("key", ["generator.in_flight", "teacher.folder"])
def test_settings_of_the_loop_are_refused_by_the_server(key):
    with pytest.raises(ConfigError, match=f"rl.{key} is for the loop of torchtitan.rl.train"):
        check_server_config(config_with({key: "x"}))


PRESETS = sorted(Path("torchtitan/rl/train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_is_a_job_that_can_start(path, tmp_path):
    flags = [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}"]
    config = ConfigManager(JobConfig).parse_args(flags)
    config.checkpoint.initial_load_path = None  # made by the pre-training run
    resolve_job(config)
    if not path.stem.endswith("pretrain"):
        check_rl_config(config)


def test_rl_sections_are_read_from_toml_and_flags(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[rl]\nnum_prompts_per_step = 4\n[rl.loss]\nname = "dapo"\n')
    module = "--job.custom_config_module=torchtitan.rl.job_config"
    flags = [f"--job.config_file={path}", "--rl.loss.entropy_coef=0.02"]
    for manager, more in (ConfigManager(JobConfig), []), (ConfigManager(), [module]):
        config = manager.parse_args([*more, *flags])
        assert config.rl.num_prompts_per_step == 4
        assert (config.rl.loss.name, config.rl.loss.entropy_coef) == ("dapo", 0.02)
