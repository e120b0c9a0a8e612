"""Every rule's message has the key, the value and the remedy; a config that obeys the rule passes."""

import copy
import errno
import os
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

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
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.model_converter import known_converter_names
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec


def config_with(**settings) -> JobConfig:
    """Return a default config with `section__key=value` settings."""
    config = JobConfig()
    for key, value in settings.items():
        *sections, name = key.split("__")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, value)
    return config


def message_of(check, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as raised:
        check(*args, **kwargs)
    return str(raised.value)


@dataclass
class ModelArgs:
    n_heads: int = 16
    n_kv_heads: int = 4
    vocab_size: int = 2048
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"


def train_spec(**fields) -> TrainSpec:
    """A TrainSpec for the checks, which build nothing."""

    def build_optimizers():
        raise AssertionError("a check builds nothing")

    build_optimizers.optimizer_names = ("Adam", "AdamW")
    flavors = {"debugmodel": ModelArgs(), "8B": ModelArgs(n_heads=32, n_kv_heads=8)}
    unused = ("model_cls", "parallelize_fn", "pipelining_fn", "build_lr_schedulers_fn")
    unused += ("build_dataloader_fn", "build_tokenizer_fn", "build_loss_fn")
    spec = dict(model_args=flavors, build_optimizers_fn=build_optimizers, state_dict_adapter=object)
    return TrainSpec(**dict.fromkeys(unused) | spec | fields)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- The config by itself ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [None, 1, 2, 8])
def test_default_config_obeys_all_rules(world_size):
    check_job_config(JobConfig(), world_size)
    check_against_spec(JobConfig(), train_spec())


def test_checks_change_nothing():
    config = config_with(training__global_batch_size=32, parallelism__data_parallel_shard_degree=-1)
    before = copy.deepcopy(config)
    check_job_config(config, 2)
    check_against_spec(config, train_spec())
    assert config == before
    assert os.listdir() == []


# settings, words of the message
MISTAKES: dict[str, tuple[dict, list[str]]] = {
    "sequence length": ({"training__seq_len": 0}, ["training.seq_len", "at least 1", "0", "2048"]),
    "steps": ({"training__steps": -5}, ["training.steps", "at least 1", "-5", "10000"]),
    "batch": ({"training__local_batch_size": 0}, ["training.local_batch_size", "got 0", "8"]),
    "gc": ({"training__gc_freq": 0}, ["training.gc_freq", "got 0", "50"]),
    "log": ({"metrics__log_freq": 0}, ["metrics.log_freq", "got 0", "10"]),
    "interval": ({"checkpoint__interval": 0}, ["checkpoint.interval", "got 0", "500"]),
    "profile": ({"profiling__profile_freq": 0}, ["profiling.profile_freq", "got 0", "10"]),
    "workers": ({"training__dataloader__num_workers": -1}, ["training.dataloader.num_workers"]),
    "validation": ({"validation__freq": 0}, ["validation.freq", "got 0", "10"]),
    "validation steps": ({"validation__steps": 0}, ["validation.steps", "got 0", "or -1"]),
    "warm-up": ({"lr_scheduler__warmup_steps": -1}, ["lr_scheduler.warmup_steps", "-1", "200"]),
    "timeout": ({"comm__train_timeout_seconds": 0}, ["comm.train_timeout_seconds", "100"]),
    "negative lr": ({"optimizer__lr": -1e-3}, ["optimizer.lr", "-0.001", "0.0008"]),
    "nan lr": ({"optimizer__lr": float("nan")}, ["optimizer.lr", "nan", "0.0008"]),
    "inf lr": ({"optimizer__lr": float("inf")}, ["optimizer.lr", "inf", "0.0008"]),
    "huge lr": ({"optimizer__lr": 10**400}, ["optimizer.lr", "at most 1e+38", "0.0008"]),
    "huge norm": (
        {"training__max_norm": 10**400},
        ["training.max_norm", "at most 1e+38, or inf"],
    ),
    "negative seed": ({"debug__seed": -1}, ["debug.seed", "at least 0", "-1", "None"]),
    "home of nobody": (
        {"job__dump_folder": "~nobody-of-that-name/x"},
        ["job.dump_folder", "'~nobody-of-that-name/x'", "expanduser"],
    ),
    "device as data": (
        {"training__dataset_path": "/dev/zero"},
        ["training.dataset_path", "'/dev/zero'", "write the data to a file"],
    ),
    "beta": ({"optimizer__beta2": 1.0}, ["optimizer.beta2", "below 1", "1.0", "0.95"]),
    "decay ratio": ({"lr_scheduler__decay_ratio": 1.5}, ["lr_scheduler.decay_ratio", "1.5"]),
    "floor": ({"lr_scheduler__min_lr_factor": -0.1}, ["lr_scheduler.min_lr_factor", "-0.1"]),
    "start": ({"lr_scheduler__init_lr_factor": 1.1}, ["lr_scheduler.init_lr_factor", "1.1"]),
    "budget": (
        {"activation_checkpoint__memory_budget": 2.0},
        ["activation_checkpoint.memory_budget", "at most 1", "2.0"],
    ),
    "clipping": ({"training__max_norm": 0.0}, ["training.max_norm", "0.0", "inf"]),
    "implementation": (
        {"optimizer__implementation": "forech"},
        ["optimizer.implementation", "'forech'", "fused", "did you mean 'foreach'?"],
    ),
    "decay": (
        {"lr_scheduler__decay_type": "log"},
        ["lr_scheduler.decay_type", "cosine", "'log'"],
    ),
    "comm mode": ({"comm__mode": "fake"}, ["comm.mode", "fake_backend", "'fake'"]),
    "attention": ({"model__attn_type": "flash"}, ["model.attn_type", "varlen", "'flash'"]),
    "nested choice": (
        {"quantize__linear__float8__recipe_name": "x"},
        ["quantize.linear.float8.recipe_name", "rowwise", "'x'"],
    ),
    "keep one": ({"checkpoint__keep_latest_k": 1}, ["checkpoint.keep_latest_k", "got 1", "use 2"]),
    "keep -1": ({"checkpoint__keep_latest_k": -1}, ["checkpoint.keep_latest_k", "got -1", "0"]),
    "hf load": (
        {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_model_only": False},
        ["checkpoint.initial_load_in_hf", "initial_load_model_only = True", "False", "set it"],
    ),
    "quantized": (
        {"checkpoint__initial_load_in_hf_quantized": True},
        ["checkpoint.initial_load_in_hf_quantized", "initial_load_in_hf = True", "set it"],
    ),
    "hf save": (
        {"checkpoint__last_save_in_hf": True, "checkpoint__last_save_model_only": False},
        ["checkpoint.last_save_in_hf", "last_save_model_only = True", "set it"],
    ),
    "initial path": (
        {"checkpoint__initial_load_path": "no/step-1"},
        ["checkpoint.initial_load_path", "'no/step-1'", "step folder itself"],
    ),
    "load step": (
        {"checkpoint__load_step": 7},
        ["checkpoint.load_step", "7", "saved are none", "-1"],
    ),
    "seed": ({"checkpoint__create_seed_checkpoint": True}, ["create_seed_checkpoint", "1 process"]),
    "ac option": (
        {"activation_checkpoint__selective_ac_option": "ops"},
        ["activation_checkpoint.selective_ac_option", "'ops'", "'op'", "'2'"],
    ),
    "ac budget": (
        {"activation_checkpoint__mode": "memory_budget"},
        ["memory_budget", "compile.enable = False", "set compile.enable = true"],
    ),
    "compile": (
        {"compile__components": ["modle"]},
        ["compile.components", "'modle'", "did you mean 'model'"],
    ),
    "async tp": (
        {"parallelism__enable_async_tensor_parallel": True, "compile__components": ["loss"]},
        ["enable_async_tensor_parallel", "['loss']", "set compile.enable = true"],
    ),
    "async tp rows": (
        {
            "parallelism__enable_async_tensor_parallel": True,
            "parallelism__tensor_parallel_degree": 2,
            "parallelism__context_parallel_degree": 3,
            "training__seq_len": 32,
            "compile__enable": True,
        },
        ["training.seq_len", "got 32 with 6", "choose a multiple"],
    ),
    "quantized tp": (
        {
            "parallelism__tensor_parallel_degree": 2,
            "model__converters": ["quantize.grouped_mm.float8"],
        },
        ["quantize.grouped_mm.float8", "tensor_parallel_degree", "got 2", "take it out"],
    ),
    "float8 output tp": (
        {
            "parallelism__tensor_parallel_degree": 2,
            "model__converters": ["quantize.linear.float8"],
            "quantize__linear__float8__filter_fqns": ["attention"],
        },
        ["output projection", "filter_fqns = ['attention']", "add 'output'"],
    ),
    "early step": (
        {"optimizer__early_step_in_backward": True, "parallelism__expert_parallel_degree": 2},
        ["optimizer.early_step_in_backward", "expert_parallel_degree", "2", "change one"],
    ),
    "profiling": (
        {"profiling__enable_profiling": True, "profiling__profile_freq": 3},
        ["profiling.profile_freq", "got 3 with 3 + 1", "set it to 4"],
    ),
    "torchft": (
        {"fault_tolerance__enable": True},
        ["fault_tolerance.enable", "leave it out", "--max-restarts"],
    ),
    "degree": (
        {"parallelism__tensor_parallel_degree": 0},
        ["parallelism.tensor_parallel_degree", "at least 1", "got 0", "default is 1"],
    ),
    "shard degree": (
        {"parallelism__data_parallel_shard_degree": -2},
        ["parallelism.data_parallel_shard_degree", "got -2", "at least 1, or -1"],
    ),
    "etp": (
        {
            "parallelism__tensor_parallel_degree": 4,
            "parallelism__expert_parallel_degree": 2,
            "parallelism__expert_tensor_parallel_degree": 2,
        },
        ["expert_tensor_parallel_degree", "got 2 with 4", "1 or 4"],
    ),
    "expert communication": (
        {"parallelism__expert_parallel_comm_backend": "deepep"},
        ["parallelism.expert_parallel_comm_backend", "'deepep'", "leave it out"],
    ),
    "dataset path": (
        {"training__dataset_path": "data/no.jsonl"},
        ["training.dataset_path", "'data/no.jsonl'", "correct the path"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_message_has_key_value_and_remedy(name):
    settings, words = MISTAKES[name]
    config = config_with(checkpoint__enable=True, **settings)
    message = message_of(check_job_config, config, world_size=2)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer__lr": 0.0},
        {"lr_scheduler__warmup_steps": 0, "lr_scheduler__decay_ratio": 0.0},
        {"training__max_norm": float("inf")},
        {"checkpoint__keep_latest_k": 0},
        {"activation_checkpoint__selective_ac_option": "op"},
        {"activation_checkpoint__mode": "memory_budget", "compile__enable": True},
        {"checkpoint__load_step": 7, "checkpoint__enable": False},
        {"optimizer__early_step_in_backward": True},
    ],
)
def test_values_at_the_edge_of_a_rule_pass(settings):
    check_job_config(config_with(**settings), 1)


def test_load_step_names_the_steps_that_are_there(tmp_path):
    (tmp_path / "outputs/checkpoint/step-10").mkdir(parents=True)
    config = config_with(checkpoint__enable=True, checkpoint__load_step=7)
    assert "step-10" in message_of(check_job_config, config)
    config.checkpoint.load_step = 10
    check_job_config(config)


def test_initial_load_path_does_not_matter_once_the_job_has_checkpoints(tmp_path):
    config = config_with(checkpoint__enable=True, checkpoint__initial_load_path="gone/step-1")
    message_of(check_job_config, config)
    (tmp_path / "outputs/checkpoint").mkdir(parents=True)
    message_of(check_job_config, config)  # a run that was started, and has no checkpoint yet
    (tmp_path / "outputs/checkpoint/step-1").mkdir()
    check_job_config(config)


def test_seed_checkpoint_needs_checkpoints_and_one_process():
    config = config_with(checkpoint__create_seed_checkpoint=True)
    assert "checkpoint.enable = True" in message_of(check_job_config, config, 1)
    config.checkpoint.enable = True
    check_job_config(config, 1)
    message = message_of(check_job_config, config, 4)
    assert "got 4" in message and "NGPU=1" in message


def test_dump_folder_under_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    message = message_of(check_job_config, config_with(job__dump_folder="file/outputs"))
    assert "job.dump_folder" in message and "'file/outputs'" in message and "choose" in message


@pytest.mark.parametrize("place", ["../elsewhere", "a/../../elsewhere"])
@pytest.mark.parametrize("key", ["checkpoint__folder", "job__save_config_file"])
def test_places_outside_the_dump_folder_are_refused(key, place):
    message = message_of(check_job_config, config_with(**{key: place}))
    assert f"{key.replace('__', '.')} is a path inside job.dump_folder" in message
    assert repr(place) in message


@pytest.mark.parametrize("name", ["", "logs/", "there"])
@pytest.mark.parametrize("key", ["job__save_config_file", "metrics__save_jsonl_file"])
def test_folders_in_place_of_files_are_refused(tmp_path, key, name):
    (tmp_path / "there").mkdir()
    config = config_with(job__dump_folder=str(tmp_path), metrics__enable_jsonl=True, **{key: name})
    message = message_of(check_job_config, config)
    assert f"{key.replace('__', '.')} must name a file" in message and repr(name) in message


def test_pareto_needs_matplotlib(monkeypatch):
    config = config_with(
        activation_checkpoint__mode="memory_budget",
        activation_checkpoint__visualize_memory_budget_pareto=True,
        compile__enable=True,
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install matplotlib" in message_of(check_job_config, config)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder nobody can write to")
def test_dump_folder_that_is_not_writable_is_named():
    message = message_of(check_job_config, config_with(job__dump_folder="/proc/x"))
    assert "job.dump_folder must be writable, got '/proc/x'" in message


def test_unfinished_step_is_named_where_the_disk_is_full(tmp_path, monkeypatch):
    """A killed job could not remove it."""
    unfinished = tmp_path / "checkpoint/step-4"
    unfinished.mkdir(parents=True)
    (unfinished / ".incomplete").touch()
    config = config_with(job__dump_folder=str(tmp_path), checkpoint__enable=True)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("tempfile.TemporaryDirectory", mock.Mock(side_effect=full))
    message = message_of(check_job_config, config)
    assert message.endswith(
        f"(No space left on device); remove {unfinished}, whose save was interrupted, or choose "
        "another"
    )


def test_dataset_path_may_be_a_hub_name_or_a_pattern(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").touch()
    for path in ("allenai/c4", "squad", "hf://datasets/x/y", "data", "./data/*.jsonl", "/tmp"):
        check_job_config(config_with(training__dataset_path=path))
    for path in ("data/b", "./data/*.txt", "/nowhere", "b.jsonl", "a/b/c"):
        message_of(check_job_config, config_with(training__dataset_path=path))


def test_validation_data_is_looked_for_only_if_used():
    config = config_with(validation__dataset_path="/nowhere")
    check_job_config(config)
    config.validation.enable = True
    assert "validation.dataset_path" in message_of(check_job_config, config)


def test_validation_sequences_fit_into_the_model():
    config = config_with(training__seq_len=64, validation__seq_len=65)
    check_job_config(config)
    config.validation.enable = True
    message = message_of(check_job_config, config)
    assert "validation.seq_len" in message and "65 with 64" in message and "64 or less" in message
    config.validation.seq_len = 64
    check_job_config(config)


def test_local_dataset_needs_a_path_that_exists(tmp_path):
    config = config_with(training__dataset="local")
    assert "training.dataset_path" in message_of(check_datasets, config, ["local"])
    config.training.dataset_path = "bare_name"  # otherwise it could be a dataset on the hub
    assert "'bare_name'" in message_of(check_datasets, config, ["local"])
    config.training.dataset_path = str(tmp_path)
    check_datasets(config, ["local"])


@pytest.mark.parametrize("policy", ["default", "always", "never", 8, "8"])
def test_parameters_may_be_kept_whole_or_freed_or_kept_within_a_number_of_ranks(policy):
    check_job_config(config_with(parallelism__fsdp_reshard_after_forward=policy))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fsdp_reshard_after_forward": "nevr"}, "got 'nevr', did you mean 'never'?"),
        ({"fsdp_reshard_after_forward": True}, "a number of ranks, got True"),
        (
            {"fsdp_reshard_after_forward": 8, "tensor_parallel_degree": 2},
            "fsdp_reshard_after_forward = 8 needs whole parameters, but tensor_parallel_degree = 2",
        ),
    ],
)
def test_wrong_reshard_policy_is_named(settings, message):
    config = config_with(**{f"parallelism__{key}": value for key, value in settings.items()})
    assert message in message_of(check_job_config, config)


def test_unknown_converter_is_named_with_the_nearest():
    known = ["quantize.linear.float8", "quantize.linear.mx"]
    config = config_with(model__converters=["quantize.linear.mx", "float8"])
    check_job_config(config)
    message = message_of(check_job_config, config, known_converters=known)
    assert "model.converters" in message and "'float8'" in message
    assert "did you mean 'quantize.linear.float8'?" in message


def test_hint_for_a_format_is_the_converter_that_serves_every_model():
    config = config_with(model__converters=["float8"])
    message = message_of(check_job_config, config, known_converters=known_converter_names())
    assert "did you mean 'quantize.linear.float8'?" in message


@pytest.mark.parametrize("number_format", ["float8", "mx"])
def test_converter_of_experts_on_a_dense_model_names_the_one_for_it(number_format):
    config = config_with(model__converters=[f"quantize.grouped_mm.{number_format}"])
    config.model.flavor = "debugmodel"
    message = message_of(check_against_spec, config, get_train_spec("llama3"))
    assert f"quantize.grouped_mm.{number_format} in model.converters converts experts" in message
    assert f"'debugmodel' has none; quantize.linear.{number_format}" in message


def test_unknown_dataset_is_named_with_the_nearest():
    config = config_with(training__dataset="python_doc", validation__dataset="none")
    message = message_of(check_datasets, config, ["c4", "python_docs"])
    assert "training.dataset" in message and "'python_doc'" in message
    assert "(c4, python_docs)" in message and "did you mean 'python_docs'?" in message
    config.training.dataset = "C4"
    check_datasets(config, ["c4"])
    config.validation.enable = True
    assert "validation.dataset" in message_of(check_datasets, config, ["c4"])


# --- Processes and batches --------------------------------------------------------------------


def test_batch_that_is_not_divisible_names_both_numbers_and_nearest_fit():
    config = config_with(training__local_batch_size=4, training__global_batch_size=10)
    message = message_of(check_job_config, config, 2)
    assert "training.global_batch_size" in message
    assert "got 10 with 4 * 2" in message and "the nearest that fits is 8" in message


def test_degrees_that_do_not_multiply_to_world_size_are_all_named():
    config = config_with(
        parallelism__data_parallel_shard_degree=3, parallelism__tensor_parallel_degree=2
    )
    message = message_of(check_job_config, config, 8)
    for part in (
        "got 8 processes and a product of 6",
        "data_parallel_replicate_degree = 1",
        "data_parallel_shard_degree = 3",
        "context_parallel_degree = 1",
        "tensor_parallel_degree = 2",
        "pipeline_parallel_degree = 1",
        "start 6 processes, or set data_parallel_shard_degree = 4",
    ):
        assert part in message


def test_degrees_larger_than_world_size_do_not_pass_as_automatic():
    config = config_with(parallelism__tensor_parallel_degree=4)
    assert "a product of 4" in message_of(check_job_config, config, 2)


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


@given(local=st.integers(1, 9), ranks=st.integers(1, 9), wanted=st.integers(0, 200))
def test_nearest_global_batch_size_fits_and_is_nearest(local, ranks, wanted):
    assume(wanted == 0 or wanted % (local * ranks))
    config = config_with(training__local_batch_size=local, training__global_batch_size=wanted)
    message = message_of(refuse, layout.global_batch_size(config, ranks))
    nearest = int(message.rsplit(" ", 1)[1])
    config.training.global_batch_size = nearest
    refuse(layout.global_batch_size(config, ranks))
    candidates = range(local * ranks, 400, local * ranks)
    assert abs(nearest - wanted) == min(abs(other - wanted) for other in candidates)


# --- The config and its model -----------------------------------------------------------------


def test_unknown_flavor_names_the_flavors_and_the_nearest():
    message = message_of(check_against_spec, config_with(model__flavor="8b"), train_spec())
    assert "model.flavor" in message and "debugmodel, 8B" in message
    assert "'8b', did you mean '8B'?" in message


def test_sdpa_with_document_mask_names_both_remedies():
    config = config_with(model__attn_mask_type="block_causal")
    message = message_of(check_against_spec, config, train_spec())
    assert "model.attn_type = 'sdpa'" in message and "'block_causal'" in message
    assert "'flex' or 'varlen'" in message and "model.attn_mask_type to 'causal'" in message
    for kernel in ("flex", "varlen"):
        check_against_spec(
            config_with(model__attn_mask_type="block_causal", model__attn_type=kernel), train_spec()
        )


def test_attention_of_the_flavor_counts_where_the_config_is_silent():
    flex = {"debugmodel": ModelArgs(attn_type="flex", attn_mask_type="block_causal")}
    check_against_spec(JobConfig(), train_spec(model_args=flex))
    config = config_with(model__attn_type="sdpa")
    assert "sdpa" in message_of(check_against_spec, config, train_spec(model_args=flex))
    unknown = {"debugmodel": ModelArgs(attn_type="flex", attn_mask_type="blok")}
    message = message_of(check_against_spec, JobConfig(), train_spec(model_args=unknown))
    assert "position_block_causal, got 'blok'" in message


@pytest.mark.parametrize(("degree", "name"), [(3, "n_heads"), (8, "n_kv_heads")])
def test_heads_not_divisible_by_tensor_parallel_degree_are_named(degree, name):
    config = config_with(parallelism__tensor_parallel_degree=degree)
    message = message_of(check_against_spec, config, train_spec())
    assert "parallelism.tensor_parallel_degree" in message
    assert f"{name} of flavor 'debugmodel', got {degree}" in message
    assert "the choices are 1, 2, 4" in message


@dataclass
class MoEModelArgs(ModelArgs):
    moe_enabled: bool = True
    moe_args: MoEArgs = field(default_factory=lambda: MoEArgs(num_experts=6))


def message_about_experts(degree, model_args):
    config = config_with(parallelism__expert_parallel_degree=degree)
    return message_of(check_against_spec, config, train_spec(model_args={"debugmodel": model_args}))


def test_experts_are_dealt_evenly():
    check_against_spec(
        config_with(parallelism__expert_parallel_degree=3),
        train_spec(model_args={"debugmodel": MoEModelArgs()}),
    )
    message = message_about_experts(4, MoEModelArgs())
    assert "expert_parallel_degree must divide the experts" in message
    assert "got 4 with 6; the choices are 1, 2, 3, 6" in message


@pytest.mark.parametrize("model_args", [ModelArgs(), MoEModelArgs(moe_enabled=False)])
def test_expert_parallelism_of_a_model_without_experts_is_refused(model_args):
    message = message_about_experts(2, model_args)
    assert "needs a flavor with experts, got 2" in message and "set it to 1" in message


@pytest.mark.parametrize(
    ("shard", "tp", "ep", "etp", "fits"),
    [(4, 1, 3, 1, "1, 2, 4"), (2, 2, 8, 1, "1, 2, 4"), (2, 2, 4, 2, "1, 2")],
)
def test_ranks_are_dealt_experts_a_whole_number_of_times(shard, tp, ep, etp, fits):
    config = config_with(
        parallelism__data_parallel_shard_degree=shard,
        parallelism__tensor_parallel_degree=tp,
        parallelism__expert_parallel_degree=ep,
        parallelism__expert_tensor_parallel_degree=etp,
    )
    message = message_of(check_job_config, config, world_size=4)
    assert "parallelism.expert_parallel_degree must divide" in message
    assert f"= {shard} * 1 * {tp} / {etp}, got {ep} with" in message
    assert message.endswith(f"; the choices are {fits}")


def test_degree_of_experts_without_effect_has_to_fit_the_ranks():
    config = config_with(parallelism__expert_tensor_parallel_degree=2)
    check_job_config(config, world_size=2)
    message = message_of(check_job_config, config, world_size=1)
    assert "expert_tensor_parallel_degree" in message and "got 2 with 1; set it to 1" in message


def test_missing_tokenizer_folder_is_named_if_a_tokenizer_is_built(tmp_path):
    config = config_with(model__hf_assets_path="nowhere")
    check_against_spec(config, train_spec())
    spec = train_spec(build_tokenizer_fn=object)
    message = message_of(check_against_spec, config, spec)
    assert "model.hf_assets_path" in message and "'nowhere'" in message
    assert "download_hf_assets" in message
    (tmp_path / "nowhere").mkdir()
    check_against_spec(config, spec)


def test_missing_weights_folder_is_named_if_the_job_starts_from_it():
    config = config_with(
        model__hf_assets_path="nowhere",
        checkpoint__enable=True,
        checkpoint__initial_load_in_hf=True,
    )
    assert "model.hf_assets_path" in message_of(check_against_spec, config, train_spec())
    config.checkpoint.initial_load_path = "elsewhere"
    check_against_spec(config, train_spec())


def test_hugging_face_files_need_an_adapter():
    config = config_with(checkpoint__enable=True, checkpoint__last_save_in_hf=True)
    check_against_spec(config, train_spec())
    message = message_of(check_against_spec, config, train_spec(state_dict_adapter=None))
    assert "checkpoint.last_save_in_hf" in message and "'llama3'" in message


def test_unknown_optimizer_is_named_unless_the_model_brings_its_own():
    config = config_with(optimizer__name="AdmaW")
    message = message_of(check_against_spec, config, train_spec())
    assert "optimizer.name" in message and "Adam, AdamW" in message
    assert "'AdmaW', did you mean 'AdamW'?" in message
    check_against_spec(config, train_spec(build_optimizers_fn=print))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"training__seq_len": 2050},
            "training.seq_len must be a multiple of 4 .* got 2050; .* 2048",
        ),
        ({"parallelism__context_parallel_load_balancer": "tail"}, "must be headtail, ptrr or None"),
        (
            {"parallelism__context_parallel_load_balancer": "ptrr"},
            "'ptrr' balances by the mask, which model.attn_type = 'sdpa' does not have",
        ),
    ],
)
def test_context_parallelism_that_does_not_fit_is_refused(changes, message):
    config = config_with(parallelism__context_parallel_degree=2, **changes)
    assert re.search(message, message_of(check_against_spec, config, train_spec()))


def test_all_to_all_of_context_parallelism_needs_enough_heads():
    config = config_with(
        parallelism__context_parallel_degree=32,
        parallelism__context_parallel_rotate_method="alltoall",
    )
    message = message_of(check_against_spec, config, train_spec())
    assert "must divide the" in message and "got 32; set the method to 'allgather'" in message


def test_tokenizer_with_more_tokens_than_the_model_is_refused():
    tokenizer = SimpleNamespace(get_vocab_size=lambda: 2049)
    message = message_of(check_tokenizer_fits, tokenizer, ModelArgs())
    assert "model.hf_assets_path" in message
    assert "2049" in message and "2048" in message and "flavor" in message
    check_tokenizer_fits(tokenizer, ModelArgs(vocab_size=2049))
    check_tokenizer_fits(tokenizer, SimpleNamespace())


def test_early_step_in_backward_cannot_accumulate_gradients():
    config = config_with(
        optimizer__early_step_in_backward=True,
        training__local_batch_size=2,
        training__global_batch_size=8,
    )
    message = message_of(check_job_config, config, 2)
    assert "optimizer.early_step_in_backward" in message
    assert "training.global_batch_size = 8" in message and "to 4" in message
    check_job_config(config, 4)


def test_early_step_in_backward_is_refused_under_ddp_alone():
    config = config_with(
        optimizer__early_step_in_backward=True,
        parallelism__data_parallel_replicate_degree=2,
    )
    check_job_config(config, 4)  # HSDP
    message = message_of(check_job_config, config, 2)
    assert "optimizer.early_step_in_backward" in message
    assert "data_parallel_replicate_degree = 2" in message and "turn" in message

    # Tensor parallelism splits parameters too, but does not sum over replicas.
    config.parallelism.tensor_parallel_degree = 2
    message = message_of(check_job_config, config, 4)
    assert "with data_parallel_shard_degree * context_parallel_degree = 1" in message
    assert "set data_parallel_shard_degree = 2" in message
    assert "whatever tensor_parallel_degree is" in message
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.data_parallel_replicate_degree = 1
    check_job_config(config, 4)


@pytest.mark.parametrize("global_batch", [0, -2])
def test_global_batch_below_one_is_refused(global_batch):
    config = config_with(training__global_batch_size=global_batch)
    message = message_of(check_job_config, config, 1)
    assert f"got {global_batch}" in message and "the nearest that fits is 8" in message


def test_rows_that_no_dataloader_makes_need_not_divide_over_context_parallel_ranks():
    config = config_with(parallelism__context_parallel_degree=2, training__seq_len=2050)
    assert "training.seq_len" in message_of(check_against_spec, config, train_spec())
    check_against_spec(config, train_spec(), builds_data=False)
