"""Every rule's message has the key, the value and the remedy; a config that obeys the rule passes."""

import copy
import dataclasses
import os
import re
import tomllib
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchtitan.config import JobConfig
from torchtitan.config.checks import (
    ConfigError,
    check_against_spec,
    check_datasets,
    check_job_config,
    check_tokenizer_fits,
    layout,
)
from torchtitan.config.checks.common import refuse
from torchtitan.data.text_datasets import DATASETS
from torchtitan.protocols.model_converter import known_converter_names
from torchtitan.protocols.train_spec import get_train_spec

MOE = {"model.name": "qwen3", "model.flavor": "debugmodel_moe_small"}


def config_with(**settings) -> JobConfig:
    """Return a default config with `section__key=value` settings."""
    config = JobConfig()
    for key, value in settings.items():
        *sections, name = key.split("__")
        section = config
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def message_of(check, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as raised:
        check(*args, **kwargs)
    return str(raised.value)


def spec_of(name="llama3", args=None, **fields):
    """The family's train spec without a tokenizer, whose debug model has other `args`."""
    spec = get_train_spec(name)
    flavors = {
        flavor: dataclasses.replace(own, **args or {}) for flavor, own in spec.model_args.items()
    }
    return dataclasses.replace(spec, **{"build_tokenizer_fn": None, "model_args": flavors} | fields)


def check(ranks: int, settings: str) -> None:
    """Run all rules. settings: TOML assignments between semicolons, of parallelism if they name no
    section; "MOE" is a flavor with experts, and `args.` a size of the flavor."""
    values: dict = {}
    for setting in filter(None, settings.split("; ")):
        if setting == "MOE":
            values |= MOE
        else:
            key, _, value = setting.partition("=")
            values[key] = None if value == "None" else tomllib.loads(f"x = {value}")["x"]
    args = {key.removeprefix("args."): values.pop(key) for key in [*values] if key[:5] == "args."}
    config = config_with(
        **{(k if "." in k else f"parallelism.{k}").replace(".", "__"): v for k, v in values.items()}
    )
    check_job_config(config, ranks, known_converter_names())
    check_against_spec(config, spec_of(config.model.name, args))
    check_datasets(config, DATASETS)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_checks_change_nothing():
    config = config_with(training__global_batch_size=32, parallelism__data_parallel_shard_degree=-1)
    before = copy.deepcopy(config)
    check_job_config(config, 2)
    check_against_spec(config, spec_of())
    assert config == before
    assert os.listdir() == []


# Ranks, settings as `check` takes them; below, what the message has in this order.
MISTAKES = """
2: training.global_batch_size=0
    training.global_batch_size must be at least 1, or -1, got 0
2: training.max_norm=0.0
    training.max_norm must be above 0, or inf, got 0.0
2: training.max_norm=1e39
    training.max_norm must be at most 1e+38, or inf
2: optimizer.beta2=1.0
    optimizer.beta2 must be below 1, got 1.0; the default is 0.95
2: model.attn_type="flash"
    model.attn_type must be one of sdpa, flex, varlen, None, got 'flash'
2: checkpoint.initial_load_in_hf=true; checkpoint.initial_load_model_only=false
    checkpoint.initial_load_in_hf = True needs checkpoint.initial_load_model_only = True, got False
2: checkpoint.initial_load_in_hf_quantized=true
    checkpoint.initial_load_in_hf_quantized … needs checkpoint.initial_load_in_hf = True … set it
2: checkpoint.enable=true; checkpoint.last_save_in_hf=true; checkpoint.last_save_model_only=false
    checkpoint.last_save_in_hf … needs checkpoint.last_save_model_only = True … set it
2: checkpoint.initial_load_path="no/step-1"
    checkpoint.initial_load_path must be … got 'no/step-1'; give the step folder itself
2: checkpoint.enable=true; checkpoint.create_seed_checkpoint=true
    checkpoint.create_seed_checkpoint runs on 1 process, got 2; start it with … NGPU=1
1: checkpoint.create_seed_checkpoint=true
    checkpoint.create_seed_checkpoint = True needs checkpoint.enable = True
2: activation_checkpoint.selective_ac_option="ops"
    activation_checkpoint.selective_ac_option must be 'op' or … got 'ops'; the default is '2'
2: activation_checkpoint.mode="memory_budget"
    activation_checkpoint.mode = 'memory_budget' … compile.enable = False … set compile.enable = true
2: training.time_limit_minutes=60.0
    training.time_limit_minutes ends the run with a checkpoint, got checkpoint.enable = False
2: compile.components=["modle"]
    compile.components must be one of model, loss, got 'modle', did you mean 'model'?
2: profiling.enable_profiling=true; profiling.profile_freq=3
    profiling.profile_freq must be at least … = 4, got 3
2: fault_tolerance.enable=true
    fault_tolerance.enable … leave it out … --max-restarts
2: validation.enable=true; validation.seq_len=65; training.seq_len=64
    validation.seq_len must not be above training.seq_len, … got 65 with 64; set it to 64 or less
2: checkpoint.folder="a/../../elsewhere"
    checkpoint.folder is a path inside job.dump_folder, … got 'a/../../elsewhere'
2: job.save_config_file=""
    job.save_config_file must name a file … got '', which is a folder; give a name
2: job.dump_folder="/"; metrics.enable_jsonl=true; metrics.save_jsonl_file="usr"
    metrics.save_jsonl_file must name a file … got 'usr', which is a folder; give a name
2: job.dump_folder=""
    job.dump_folder must name a folder, got ''
2: job.dump_folder="/dev/null/outputs"
    job.dump_folder must be a writable folder, got '/dev/null/outputs', … (Not a directory); choose another
2: model.flavor="8b"
    model.flavor of 'llama3' must be one of … got '8b', did you mean '8B'?
2: optimizer.name="AdmaW"
    optimizer.name must be one of … got 'AdmaW', did you mean 'AdamW'?
2: model.attn_type="sdpa"; model.attn_mask_type="block_causal"
    model.attn_type = 'sdpa' … 'block_causal' … set model.attn_type to 'flex' or 'varlen', or …
1: args.attn_type="flex"; args.attn_mask_type="blok"
    model.attn_mask_type must be one of … position_block_causal, got 'blok'
1: training.dataset="local"
    training.dataset = 'local' reads … training.dataset_path, which must exist, got None
1: training.dataset="local"; training.dataset_path="bare_name"
    training.dataset_path, which must exist, got 'bare_name'
1: training.dataset="python_doc"
    training.dataset must be … c4, … got 'python_doc', did you mean 'python_docs'?
1: validation.enable=true; validation.dataset="none"
    validation.dataset must be … got 'none'
2: model.converters=["quantize.grouped_mm.mx"]
    quantize.grouped_mm.mx in model.converters converts experts, … has none; quantize.linear.mx
8: data_parallel_shard_degree=3; tensor_parallel_degree=2
    got 8 processes and a product of 6: … tensor_parallel_degree = 2 … start 6 processes, or set data_parallel_shard_degree = 4
4: comm.mode="fake_backend"; checkpoint.enable=true
    checkpoint.enable … 'fake_backend' … only one rank's part … 4 ranks; set checkpoint.enable to False
2: enable_async_tensor_parallel=true; compile.components=["loss"]
    enable_async_tensor_parallel needs … ['loss']; set compile.enable = true
6: enable_async_tensor_parallel=true; tensor_parallel_degree=2; context_parallel_degree=3; training.seq_len=32; compile.enable=true
    training.seq_len … got 32 with 6; choose a multiple
2: tensor_parallel_degree=2; model.converters=["quantize.grouped_mm.float8"]
    quantize.grouped_mm.float8 … needs parallelism.tensor_parallel_degree = 1, got 2; take it out
2: tensor_parallel_degree=2; model.converters=["quantize.linear.float8"]; quantize.linear.float8.filter_fqns=["wq"]
    output projection … filter_fqns = ['wq']; add 'output'
3: tensor_parallel_degree=3
    tensor_parallel_degree must divide n_heads … got 3 with 16; the choices are 1, 2, 4, 8, 16
4: tensor_parallel_degree=4; args.n_kv_heads=2
    tensor_parallel_degree must divide n_kv_heads … got 4 with 2; the choices are 1, 2
2: tensor_parallel_degree=2; args.vocab_size=2049
    tensor_parallel_degree must divide vocab_size … got 2 with 2049; the choices are 1
4: tensor_parallel_degree=4; args.hidden_dim=130
    tensor_parallel_degree must divide ffn_hidden_dim … got 4 with 130; the choices are 1, 2
4: MOE; tensor_parallel_degree=4; args.moe_inter_dim=6
    tensor_parallel_degree must divide moe_inter_dim … got 4 with 6; the choices are 1, 2
2: context_parallel_degree=2; training.seq_len=2050
    training.seq_len must be a multiple of 4 … got 2050; the nearest is 2048
2: context_parallel_degree=2; validation.enable=true; validation.seq_len=1001
    validation.seq_len must be a multiple of 4 … got 1001; the nearest is 1000
2: context_parallel_degree=2; context_parallel_load_balancer="ptrr"; training.seq_len=300; model.attn_type="flex"
    training.seq_len must be a multiple of 256 … 'ptrr', got 300; the nearest is 256
2: context_parallel_degree=2; context_parallel_load_balancer="ptrr"
    context_parallel_load_balancer = 'ptrr' … 'sdpa' … set the balancer to 'headtail'
2: context_parallel_degree=2; context_parallel_load_balancer="tail"
    context_parallel_load_balancer must be headtail, ptrr or None, got 'tail'
32: context_parallel_degree=16; tensor_parallel_degree=2; context_parallel_rotate_method="alltoall"
    context_parallel_degree must divide a rank's attention heads, … 'alltoall' … got 16 with 8
16: pipeline_parallel_degree=16
    pipeline_parallel_degree = 16 … 16 stages, which 6 layers don't fill … lower the degree
2: pipeline_parallel_degree=2; pipeline_parallel_first_stage_less_layers=9
    pipeline_parallel_degree = 2 … embedding weighs 9 … less_layers
2: pipeline_parallel_degree=2; pipeline_parallel_schedule="1F2B"
    pipeline_parallel_schedule must be one of … got '1F2B', did you mean '1F1B'?
2: pipeline_parallel_degree=2; pipeline_parallel_layers_per_stage=2
    schedule = '1F1B' needs exactly 1 stage per rank … give 4 stages … change the number
2: pipeline_parallel_degree=2; pipeline_parallel_layers_per_stage=1; pipeline_parallel_schedule="DualPipeV"
    'DualPipeV' needs exactly 2 stages per rank … give 8 stages … change the number
2: pipeline_parallel_degree=2; pipeline_parallel_layers_per_stage=3; pipeline_parallel_schedule="LoopedBFS"
    must be a multiple of parallelism.pipeline_parallel_degree … give 3 stages … change
2: pipeline_parallel_degree=2; pipeline_parallel_schedule="PipelineScheduleMulti"
    'PipelineScheduleMulti' reads its schedule from a CSV file; set pipeline_parallel_schedule_csv
2: pipeline_parallel_degree=2; pipeline_parallel_schedule_csv="no.csv"
    pipeline_parallel_schedule_csv = 'no.csv' cannot be read … No such file
2: pipeline_parallel_degree=2; pipeline_parallel_microbatch_size=3
    pipeline_parallel_microbatch_size must divide … got 3 with 8; the choices are 1, 2, 4, 8
2: pipeline_parallel_degree=2; args.n_layers=2; module_fqns_per_model_part=[["tok_embeddings","layers.0"],["norm","output"]]
    module_fqns_per_model_part must list … lacks ['layers.1']; correct it
2: pipeline_parallel_degree=2; args.n_layers=1; module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.0","norm","output"]]
    module_fqns_per_model_part must list … repeats ['layers.0']; correct it
2: pipeline_parallel_degree=2; args.n_layers=1; module_fqns_per_model_part=[["tok_embeddings"],["layers.0"],["norm","output"]]
    lists in module_fqns_per_model_part give 3 stages for 2 ranks; change one
2: pipeline_parallel_degree=2; pipeline_parallel_schedule="InterleavedZeroBubble"; compile.enable=true
    'InterleavedZeroBubble' … got compile.enable = True … turn compile off
3: MOE; expert_parallel_degree=3
    expert_parallel_degree must divide the experts … got 3 with … the choices are 1, 2
2: expert_parallel_degree=2
    expert_parallel_degree above 1 needs a flavor with experts, got 2 … set it to 1
2: MOE; expert_parallel_degree=4
    expert_parallel_degree must divide … = 2 * 1 * 1 / 1, got 4 with 2; the choices are 1, 2
2: MOE; expert_parallel_degree=2; pipeline_parallel_degree=2
    expert_parallel_degree must divide … = 1 * 1 * 1 / 1, got 2 with 1; the choices are 1
4: MOE; expert_parallel_degree=2; tensor_parallel_degree=4; expert_tensor_parallel_degree=2
    expert_tensor_parallel_degree must be 1 or equal … got 2 with 4; set it to 1 or 4
1: expert_tensor_parallel_degree=2
    expert_tensor_parallel_degree must be 1 or equal … got 2 with 1; set it to 1
2: MOE; expert_parallel_degree=2; expert_parallel_comm_backend="deepep"
    expert_parallel_comm_backend must be one of standard, got 'deepep'
2: pipeline_parallel_degree=2; optimizer.early_step_in_backward=true
    optimizer.early_step_in_backward … got parallelism.pipeline_parallel_degree = 2; change one
2: optimizer.early_step_in_backward=true; training.local_batch_size=2; training.global_batch_size=8
    optimizer.early_step_in_backward … training.global_batch_size = 8 … set global_batch_size to 4
2: optimizer.early_step_in_backward=true; data_parallel_replicate_degree=2
    optimizer.early_step_in_backward … data_parallel_replicate_degree = 2 … turn
4: optimizer.early_step_in_backward=true; data_parallel_replicate_degree=2; tensor_parallel_degree=2
    with data_parallel_shard_degree * context_parallel_degree = 1; set data_parallel_shard_degree = 2
"""

ROWS = re.findall(r"^(\d+): (.*)\n    (.*)$", MISTAKES, re.M)


@pytest.mark.parametrize("ranks, settings, words", ROWS, ids=[row[1] for row in ROWS])
def test_message_is_one_sentence_with_key_value_and_remedy(ranks, settings, words):
    message = message_of(check, int(ranks), settings)
    assert re.search(".*".join(re.escape(part.strip()) for part in words.split("…")), message)
    assert not re.search(r"[.?!] [A-Z]|\n", message)


# Ranks and settings.
EDGES = """
1: optimizer.lr=0.0
1: lr_scheduler.warmup_steps=0; lr_scheduler.decay_ratio=0.0
1: training.max_norm=inf
1: checkpoint.keep_latest_k=0
1: activation_checkpoint.selective_ac_option="op"
1: activation_checkpoint.mode="memory_budget"; compile.enable=true
1: optimizer.early_step_in_backward=true
4: optimizer.early_step_in_backward=true; data_parallel_replicate_degree=2
1: training.seq_len=64; validation.seq_len=65
2: expert_tensor_parallel_degree=2
8: tensor_parallel_degree=2; context_parallel_degree=2; pipeline_parallel_degree=2
2: tensor_parallel_degree=2; training.seq_len=2049
2: MOE; tensor_parallel_degree=2; args.hidden_dim=31
2: MOE; tensor_parallel_degree=2; expert_parallel_degree=2; args.moe_inter_dim=31; args.hidden_dim=31
1: fsdp_reshard_after_forward="always"
1: args.attn_type="flex"; args.attn_mask_type="block_causal"
1: training.dataset="C4"; validation.dataset="none"
1: training.dataset="local"; training.dataset_path="/tmp"
1: training.dataset_path="allenai/c4"
1: training.dataset_path="squad"
1: training.dataset_path="hf://x/y/z"
"""


@pytest.mark.parametrize("row", EDGES.split("\n")[1:-1])
def test_values_at_the_edge_of_a_rule_pass(row):
    ranks, _, settings = row.partition(": ")
    check(int(ranks), settings)


def test_initial_load_path_does_not_matter_once_the_job_has_checkpoints(tmp_path):
    config = config_with(checkpoint__enable=True, checkpoint__initial_load_path="gone/step-1")
    (tmp_path / "outputs/checkpoint").mkdir(parents=True)
    message_of(check_job_config, config)  # a run that was started, and has no checkpoint yet
    (tmp_path / "outputs/checkpoint/step-1").mkdir()
    check_job_config(config)


def test_dataset_path_may_be_a_pattern(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").touch()
    for path in ("data", "./data/*.jsonl", "/tmp"):
        check_job_config(config_with(training__dataset_path=path))
    for path in ("data/b", "./data/*.txt", "/nowhere", "b.jsonl", "a/b/c"):
        message_of(check_job_config, config_with(training__dataset_path=path))


degree = st.integers(1, 4)


@given(
    replicate=degree, shard=st.one_of(st.just(-1), degree), tp=degree, world_size=st.integers(1, 16)
)
def test_degrees_pass_exactly_when_they_multiply_to_world_size(replicate, shard, tp, world_size):
    config = config_with(
        parallelism__data_parallel_replicate_degree=replicate,
        parallelism__data_parallel_shard_degree=shard,
        parallelism__tensor_parallel_degree=tp,
    )
    fits = (
        world_size % (replicate * tp) == 0 if shard == -1 else replicate * shard * tp == world_size
    )
    if fits:
        refuse(layout.world_size(config, world_size))
    else:
        message_of(refuse, layout.world_size(config, world_size))


@given(local=st.integers(1, 9), ranks=st.integers(1, 9), wanted=st.integers(1, 200))
def test_nearest_global_batch_size_fits_and_is_nearest(local, ranks, wanted):
    assume(wanted % (local * ranks))
    config = config_with(training__local_batch_size=local, training__global_batch_size=wanted)
    message = message_of(refuse, layout.global_batch_size(config, ranks))
    nearest = int(message.rsplit(" ", 1)[1])
    config.training.global_batch_size = nearest
    refuse(layout.global_batch_size(config, ranks))
    candidates = range(local * ranks, 400, local * ranks)
    assert abs(nearest - wanted) == min(abs(other - wanted) for other in candidates)


# --- The config and its model -----------------------------------------------------------------


def test_folder_of_hugging_face_files_is_needed_for_a_tokenizer_and_for_weights(tmp_path):
    config = config_with(model__hf_assets_path="nowhere", checkpoint__enable=True)
    check_against_spec(config, spec_of())
    with_tokenizer = spec_of(build_tokenizer_fn=object)
    message = message_of(check_against_spec, config, with_tokenizer)
    assert "model.hf_assets_path" in message and "'nowhere'" in message
    assert "hf download" in message
    config.checkpoint.initial_load_in_hf = True
    assert "model.hf_assets_path" in message_of(check_against_spec, config, spec_of())
    config.checkpoint.initial_load_path = "elsewhere"
    check_against_spec(config, spec_of())
    (tmp_path / "nowhere").mkdir()
    check_against_spec(config, with_tokenizer)


def test_what_a_spec_lacks_is_refused_where_the_config_needs_it():
    config = config_with(checkpoint__enable=True, checkpoint__last_save_in_hf=True)
    check_against_spec(config, spec_of())
    message = message_of(check_against_spec, config, spec_of(state_dict_adapter=None))
    assert "checkpoint.last_save_in_hf" in message and "'llama3'" in message
    config = config_with(parallelism__pipeline_parallel_degree=2)
    message = message_of(check_against_spec, config, spec_of(pipelining_fn=None))
    assert "'llama3' has no pipelining_fn; set the degree to 1" in message
    # Optimizers of its own may have any name.
    check_against_spec(config_with(optimizer__name="mine"), spec_of(build_optimizers_fn=print))


def test_tokenizer_with_more_tokens_than_the_model_is_refused():
    tokenizer = SimpleNamespace(get_vocab_size=lambda: 2049)
    message = message_of(check_tokenizer_fits, tokenizer, SimpleNamespace(vocab_size=2048))
    assert "model.hf_assets_path" in message
    assert "2049" in message and "2048" in message and "flavor" in message
    check_tokenizer_fits(tokenizer, SimpleNamespace(vocab_size=2049))
    check_tokenizer_fits(tokenizer, SimpleNamespace())


def test_rows_that_no_dataloader_makes_need_not_divide_over_context_parallel_ranks():
    config = config_with(parallelism__context_parallel_degree=2, training__seq_len=2050)
    check_against_spec(config, spec_of(), builds_data=False)
