"""Rules a config has to obey, one function per rule; those about layouts are in `layout_checks`.

Each rule only reads the config, and raises `ConfigError` with the rule, the key, the value it
got and what to change. None of them touches a device, a process group or data.
"""

import dataclasses
import glob
import math
import os
import tempfile
from collections.abc import Collection, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torchtitan.config import layout_checks as layouts
from torchtitan.config.check_helpers import (
    ConfigError,
    compile_settings,
    compiles_model,
    data_sections,
    guess,
    has_experts,
)
from torchtitan.config.job_config import JobConfig


def check_job_config(
    job_config: JobConfig,
    world_size: int | None = None,
    known_converters: Collection[str] | None = None,
    builds_data: bool = True,
) -> None:
    """Raise ConfigError at the first rule the config breaks, as far as it alone can tell.

    world_size: number of processes in the job; None leaves out the rules that depend on it.
    known_converters: the registered names; None leaves the names unchecked.
    builds_data: False for a bare engine, which reads no data and writes less.
    """
    check_choices(job_config)
    check_ranges(job_config)
    check_texts(job_config)
    check_fractions(job_config)
    check_decay_betas(job_config)
    check_max_norm(job_config)
    check_keep_latest_k(job_config)
    check_time_limit(job_config)
    check_checkpoint_formats(job_config)
    check_initial_load_path(job_config)
    check_load_step(job_config)
    check_activation_checkpoint(job_config)
    check_compile_components(job_config)
    check_compile_backend(job_config)
    layouts.check_async_tensor_parallel(job_config)
    layouts.check_quantized_tensor_parallel(job_config)
    layouts.check_early_step_in_backward(job_config)
    check_fault_tolerance_is_off(job_config)
    check_places_in_dump_folder(job_config)
    if builds_data or _engine_writes(job_config):
        check_dump_folder(job_config)
    if builds_data:
        check_dataset_paths(job_config)
    check_validation_seq_len(job_config)
    check_validation_steps(job_config)
    check_profiling_cycle(job_config)
    if known_converters is not None:
        check_converters(job_config, known_converters)

    layouts.check_degrees(job_config)
    layouts.check_reshard_after_forward(job_config)
    layouts.check_expert_parallel_comm_backend(job_config)
    layouts.check_expert_tensor_parallel_degree(job_config)
    if world_size is not None:
        layouts.check_degrees_match_world_size(job_config, world_size)
        layouts.check_ranks_for_experts(job_config, world_size)
        layouts.check_global_batch_size(job_config, world_size)
        check_seed_checkpoint(job_config, world_size)
        layouts.check_early_step_with_ddp(job_config, world_size)


def check_against_spec(
    job_config: JobConfig,
    train_spec: Any,
    world_size: int | None = None,
    builds_data: bool = True,
) -> None:
    """Raise ConfigError at the first rule the config breaks for the model it names.

    train_spec: the `TrainSpec` that belongs to `job_config.model.name`.
    world_size, builds_data: as in `check_job_config`.
    """
    check_flavor(job_config, train_spec)
    check_attention(job_config, train_spec)
    layouts.check_tensor_parallel_sizes(job_config, train_spec)
    layouts.check_num_experts(job_config, train_spec)
    check_converters_of_experts(job_config, train_spec)
    check_hf_assets(job_config, builds_data and train_spec.build_tokenizer_fn is not None)
    check_hf_conversion(job_config, train_spec)
    check_optimizer_name(job_config, train_spec)
    layouts.check_context_parallel(job_config, train_spec, builds_data)
    layouts.check_pipeline_schedule(job_config)
    layouts.check_pipeline_stages(job_config, train_spec)


# --- Values by themselves ---------------------------------------------------------------------


def check_choices(job_config: JobConfig) -> None:
    """A config built in Python did not pass the type checks that TOML and flags do."""
    for key, value, annotation in _settings(job_config):
        choices = _choices(annotation)
        if choices and value not in choices:
            names = ", ".join(repr(choice) for choice in choices)
            raise ConfigError(f"{key} must be one of {names}, got {value!r}{guess(value, choices)}")


# What a number may be at least, and at most where that is not _MOST: beyond it lie typing errors,
# and numbers that some library does not take. Some keys have a rule of their own for the least.
_MOST = 10**9
_RANGES: dict[str, tuple[float, float]] = {
    "training.seq_len": (1, _MOST),
    "training.steps": (1, 10**12),
    "training.local_batch_size": (1, _MOST),
    "training.global_batch_size": (-math.inf, _MOST),
    "training.time_limit_minutes": (0, 10**8),
    "training.gc_freq": (1, 10**12),
    "training.dataloader.num_workers": (0, 1024),
    "training.dataloader.prefetch_factor": (1, _MOST),
    "validation.seq_len": (1, _MOST),
    "validation.local_batch_size": (1, _MOST),
    "validation.freq": (1, 10**12),
    "validation.steps": (-math.inf, 10**12),
    "validation.dataloader.num_workers": (0, 1024),
    "validation.dataloader.prefetch_factor": (1, _MOST),
    "metrics.log_freq": (1, 10**12),
    "checkpoint.interval": (1, 10**12),
    "checkpoint.load_step": (-1, 10**12),
    "checkpoint.keep_latest_k": (-math.inf, _MOST),
    "profiling.profile_freq": (1, 10**12),
    "profiling.profiler_active": (1, _MOST),
    "profiling.profiler_warmup": (0, _MOST),
    "optimizer.lr": (0, math.inf),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "lr_scheduler.warmup_steps": (0, 10**12),
    "lr_scheduler.total_steps": (1, 10**12),
    "lr_scheduler.step_offset": (-(10**12), 10**12),
    "parallelism.pipeline_parallel_microbatch_size": (1, _MOST),
    "parallelism.pipeline_parallel_first_stage_less_layers": (0, _MOST),
    "parallelism.pipeline_parallel_last_stage_less_layers": (0, _MOST),
    "parallelism.pipeline_parallel_layers_per_stage": (-math.inf, _MOST),
    "parallelism.expert_tensor_parallel_degree": (-math.inf, _MOST),
    "comm.init_timeout_seconds": (1, 10**8),
    "comm.train_timeout_seconds": (1, 10**8),
    "comm.trace_buf_size": (0, _MOST),
    "debug.seed": (-(2**63), 2**64 - 1),
    "debug.check_document_isolation_freq": (0, 10**12),
}


def check_ranges(job_config: JobConfig) -> None:
    for key, (smallest, largest) in _RANGES.items():
        value = _value(job_config, key)
        # Written so that nan, which compares false with everything, fails too.
        if value is None or (smallest <= value <= largest and value < math.inf):
            continue
        least = f"a finite number of at least {smallest}"
        wanted = least if largest == math.inf or value < smallest else f"at most {largest}"
        raise ConfigError(
            f"{key} must be {wanted}, got {value}; the default is {_value(JobConfig(), key)}"
        )


def check_texts(job_config: JobConfig) -> None:
    """No path, name or log line can hold these."""
    for key, value, _ in _settings(job_config):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and ("\0" in text or not _is_unicode(text)):
                raise ConfigError(
                    f"{key} must be text without NUL characters and in UTF-8, got {text!r}; "
                    "correct it"
                )


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, as Python makes of a bad byte on the command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fractions(job_config: JobConfig) -> None:
    for key in (
        "lr_scheduler.decay_ratio",
        "lr_scheduler.min_lr_factor",
        "activation_checkpoint.memory_budget",
    ):
        value = _value(job_config, key)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(
                f"{key} is a fraction, from 0 to 1, got {value}; choose one in between"
            )


def check_decay_betas(job_config: JobConfig) -> None:
    for key in ("optimizer.beta1", "optimizer.beta2"):
        value = _value(job_config, key)
        if not 0 <= value < 1:
            raise ConfigError(
                f"{key} must be at least 0 and below 1, got {value}; "
                f"the default is {_value(JobConfig(), key)}"
            )


def check_max_norm(job_config: JobConfig) -> None:
    max_norm = job_config.training.max_norm
    if not max_norm > 0:
        raise ConfigError(
            f"training.max_norm must be above 0, got {max_norm}; use inf to clip nothing"
        )


# --- Checkpoints ------------------------------------------------------------------------------


def check_time_limit(job_config: JobConfig) -> None:
    checkpoint = job_config.checkpoint
    if job_config.training.time_limit_minutes and (not checkpoint.enable or checkpoint.load_only):
        raise ConfigError(
            f"training.time_limit_minutes ends the run with a checkpoint, got checkpoint.enable = "
            f"{checkpoint.enable} and checkpoint.load_only = {checkpoint.load_only}; have it saved, "
            f"or leave the limit out"
        )


def check_keep_latest_k(job_config: JobConfig) -> None:
    keep = job_config.checkpoint.keep_latest_k
    if keep < 0 or keep == 1:
        raise ConfigError(
            f"checkpoint.keep_latest_k must be 0 (keep all) or at least 2, as the only checkpoint "
            f"would be deleted while its successor is still being written, got {keep}; "
            f"use 2 to keep as few as possible"
        )


def check_checkpoint_formats(job_config: JobConfig) -> None:
    """Hugging Face files hold a model's weights and nothing else."""
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return
    for key, needed in (
        ("initial_load_in_hf", "initial_load_model_only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf"),
        ("last_save_in_hf", "last_save_model_only"),
    ):
        if getattr(checkpoint, key) and not getattr(checkpoint, needed):
            raise ConfigError(
                f"checkpoint.{key} = True needs checkpoint.{needed} = True, got False; "
                f"set it, or turn checkpoint.{key} off"
            )


def check_initial_load_path(job_config: JobConfig) -> None:
    checkpoint = job_config.checkpoint
    path = checkpoint.initial_load_path
    if not checkpoint.enable or not path or _own_steps(job_config):
        return
    if not os.path.isdir(path):
        raise ConfigError(
            f"checkpoint.initial_load_path must be an existing checkpoint folder, got {path!r}; "
            f"give the step folder itself, such as .../checkpoint/step-1000"
        )


def check_load_step(job_config: JobConfig) -> None:
    checkpoint = job_config.checkpoint
    folder, found = _checkpoint_folder(job_config), _own_steps(job_config)
    starts_elsewhere = not found and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf)
    if not checkpoint.enable or checkpoint.load_step == -1 or starts_elsewhere:
        return
    if not os.path.isdir(os.path.join(folder, f"step-{checkpoint.load_step}")):
        raise ConfigError(
            f"checkpoint.load_step must be a step saved in {folder!r}, got "
            f"{checkpoint.load_step}; there is {', '.join(found) or 'nothing'}, "
            f"and -1 takes the newest or starts afresh"
        )


def check_seed_checkpoint(job_config: JobConfig, world_size: int) -> None:
    if not job_config.checkpoint.create_seed_checkpoint:
        return
    if not job_config.checkpoint.enable:
        raise ConfigError(
            "checkpoint.create_seed_checkpoint needs checkpoint.enable = True, got False; set it"
        )
    if world_size != 1:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint runs on 1 process, got {world_size}; "
            f"start it with --nproc-per-node 1 (NGPU=1)"
        )


# --- Features that need, or exclude, one another ----------------------------------------------


def check_activation_checkpoint(job_config: JobConfig) -> None:
    ac = job_config.activation_checkpoint
    option = ac.selective_ac_option
    is_number = option.isascii() and option.isdigit() and len(option) <= 9 and int(option) > 0
    if ac.mode == "selective" and option != "op" and not is_number:
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option must be 'op' or a whole number n of at "
            f"least 1 in quotes (every n-th layer), got {option!r}; the default is '2'"
        )
    if ac.determinism_check not in ("default", "none"):
        raise ConfigError(
            f"activation_checkpoint.determinism_check must be 'default' or 'none', got "
            f"{ac.determinism_check!r}"
        )
    if ac.mode == "memory_budget" and not compiles_model(job_config):
        raise ConfigError(
            f"activation_checkpoint.mode = 'memory_budget' is carried out by the compiler, got "
            f"{compile_settings(job_config)}; set compile.enable = true with 'model' among its "
            f"components, or mode = 'selective'"
        )


def check_compile_components(job_config: JobConfig) -> None:
    for name in job_config.compile.components:
        if name not in ("model", "loss"):
            raise ConfigError(
                f"compile.components can hold 'model' and 'loss', got {name!r}; take it out"
            )


def check_compile_backend(job_config: JobConfig) -> None:
    backend = job_config.compile.backend
    if not job_config.compile.enable or backend == JobConfig().compile.backend:
        return
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile.backend must be a registered backend of torch.compile ({', '.join(known)}), "
            f"got {backend!r}{guess(backend, known)}; correct it, or register it in the module "
            f"that experimental.custom_import names"
        )


def check_profiling_cycle(job_config: JobConfig) -> None:
    profiling = job_config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        raise ConfigError(
            f"profiling.profile_freq must be at least profiler_warmup + profiler_active, got "
            f"{profiling.profile_freq} with {profiling.profiler_warmup} + "
            f"{profiling.profiler_active}; set it to {needed} or more"
        )


def check_fault_tolerance_is_off(job_config: JobConfig) -> None:
    if job_config.fault_tolerance.enable:
        raise ConfigError(
            "fault_tolerance.enable = True is not available in this version; set it to false"
        )


def check_converters(job_config: JobConfig, known: Collection[str]) -> None:
    # Most models are dense: guess the converters that serve them first.
    known = sorted(known, key=lambda name: ".grouped_mm." in name)
    for name in job_config.model.converters:
        if name not in known:
            raise ConfigError(
                f"model.converters holds names of registered converters ({', '.join(known)}), got "
                f"{name!r}{guess(name, known)}; correct it, or register it in the module that "
                f"experimental.custom_import names"
            )


def check_converters_of_experts(job_config: JobConfig, train_spec: Any) -> None:
    flavor = job_config.model.flavor
    for name in job_config.model.converters:
        if name.startswith("quantize.grouped_mm.") and not has_experts(
            train_spec.model_args[flavor]
        ):
            raise ConfigError(
                f"{name} in model.converters converts experts, and {job_config.model.name!r} flavor "
                f"{flavor!r} has none; {name.replace('grouped_mm', 'linear')} converts the linear "
                f"layers of dense models"
            )


def check_datasets(job_config: JobConfig, known: Collection[str]) -> None:
    for section in data_sections(job_config):
        name = getattr(job_config, section).dataset
        path = getattr(job_config, section).dataset_path
        if name.lower() not in known:
            raise ConfigError(
                f"{section}.dataset must be a registered dataset ({', '.join(known)}), got "
                f"{name!r}{guess(name, known)}; correct it, or register it in the module that "
                f"experimental.custom_import names"
            )
        if name.lower() == "local" and not os.path.exists(path or ""):
            raise ConfigError(
                f"{section}.dataset = 'local' reads the file or folder {section}.dataset_path, which "
                f"must exist, got {path!r} (looked in {os.getcwd()}); set or correct the path"
            )


# --- Files ------------------------------------------------------------------------------------


def _engine_writes(job_config: JobConfig) -> bool:
    return (
        job_config.checkpoint.enable
        or job_config.job.save_config_file is not None
        or job_config.activation_checkpoint.visualize_memory_budget_pareto
    )


def check_places_in_dump_folder(job_config: JobConfig) -> None:
    """What a job writes doesn't climb out of its dump folder, where another job's may be; a whole
    path is a choice."""
    for key in (
        "checkpoint.folder",
        "job.save_config_file",
        "metrics.save_tb_folder",
        "metrics.save_jsonl_file",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
        "comm.save_traces_folder",
    ):
        place = _value(job_config, key) or ""
        if ".." in place.split(os.sep):
            raise ConfigError(
                f"{key} is a path inside job.dump_folder, so it has no '..', got {place!r}; correct "
                "it, change job.dump_folder, or give the whole path"
            )


def check_dump_folder(job_config: JobConfig) -> None:
    if not job_config.job.dump_folder:
        raise ConfigError("job.dump_folder must name a folder, got ''; the default is './outputs'")
    _check_writable("job.dump_folder", job_config.job.dump_folder)
    checkpoint = job_config.checkpoint
    if checkpoint.enable and not checkpoint.load_only:
        _check_writable("checkpoint.folder", _checkpoint_folder(job_config))


def _check_writable(key: str, folder: str) -> None:
    path = os.path.abspath(folder)
    existing = path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ConfigError(
            f"{key} must be a folder, or a place for one, got {folder!r}, but "
            f"{existing!r} is a file; choose another"
        )
    try:
        # os.access believes that root may write everywhere.
        with tempfile.TemporaryDirectory(dir=existing, prefix=".writable-") as trial:
            os.makedirs(os.path.join(trial, os.path.relpath(path, existing)), exist_ok=True)
            with open(os.path.join(trial, "file"), "w") as file:
                file.write("Is there room?")
    except OSError as error:
        raise ConfigError(
            f"{key} must be writable, got {folder!r}, but in {existing!r} it cannot be made "
            f"({error.strerror}); choose another"
        ) from None


def check_dataset_paths(job_config: JobConfig) -> None:
    for section in data_sections(job_config):
        check_dataset_path(f"{section}.dataset_path", getattr(job_config, section).dataset_path)


def check_validation_seq_len(job_config: JobConfig) -> None:
    training, validation = job_config.training.seq_len, job_config.validation.seq_len
    if job_config.validation.enable and validation > training:
        raise ConfigError(
            f"validation.seq_len must not be above training.seq_len, which sets how many positions "
            f"the model knows, got {validation} with {training}; set it to {training} or less"
        )


def check_validation_steps(job_config: JobConfig) -> None:
    steps = job_config.validation.steps
    if steps < 1 and steps != -1:
        raise ConfigError(
            f"validation.steps must be at least 1, or -1 for all of the data, got {steps}; "
            f"the default is {JobConfig().validation.steps}"
        )


def check_dataset_path(key: str, path: str | None) -> None:
    if path and _looks_local(path) and not glob.glob(path) and not os.path.exists(path):
        raise ConfigError(
            f"{key} must be an existing file or folder, or the name of a dataset on the hub, got "
            f"{path!r} (looked in {os.getcwd()}); correct the path"
        )


# --- The config and the model it names --------------------------------------------------------


def check_flavor(job_config: JobConfig, train_spec: Any) -> None:
    flavor, known = job_config.model.flavor, list(train_spec.model_args)
    if flavor not in known:
        raise ConfigError(
            f"model.flavor must be a flavor of {job_config.model.name!r} ({', '.join(known)}), "
            f"got {flavor!r}{guess(flavor, known)}"
        )


def check_attention(job_config: JobConfig, train_spec: Any) -> None:
    model, model_args = job_config.model, train_spec.model_args[job_config.model.flavor]
    attn_type = model.attn_type or getattr(model_args, "attn_type", "sdpa")
    mask_type = model.attn_mask_type or getattr(model_args, "attn_mask_type", "causal")
    if attn_type == "sdpa" and mask_type != "causal":
        raise ConfigError(
            f"model.attn_type = 'sdpa' cannot keep documents apart, got "
            f"model.attn_mask_type = {mask_type!r} with flavor {model.flavor!r}; set "
            f"model.attn_type to 'flex' or 'varlen', or model.attn_mask_type to 'causal'"
        )


def check_hf_assets(job_config: JobConfig, needs_tokenizer: bool) -> None:
    """The folder with the tokenizer, and with the weights to start from, has to be there."""
    path, checkpoint = job_config.model.hf_assets_path, job_config.checkpoint
    starts_from_it = (
        checkpoint.enable and checkpoint.initial_load_in_hf and not checkpoint.initial_load_path
    )
    starts_from_it = starts_from_it and not _own_steps(job_config)
    if not (needs_tokenizer or starts_from_it) or os.path.isdir(path):
        return
    raise ConfigError(
        f"model.hf_assets_path must be a folder with Hugging Face files (tokenizer.json, ...), "
        f"got {path!r} (looked in {os.getcwd()}); correct the path, or fetch them with "
        f"scripts/download_hf_assets.py"
    )


def check_hf_conversion(job_config: JobConfig, train_spec: Any) -> None:
    if not job_config.checkpoint.enable or train_spec.state_dict_adapter is not None:
        return
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(job_config.checkpoint, key):
            raise ConfigError(
                f"checkpoint.{key} = True needs a model that can be converted to Hugging Face "
                f"format, got {job_config.model.name!r}, which cannot; turn it off"
            )


def check_optimizer_name(job_config: JobConfig, train_spec: Any) -> None:
    # A spec that brings its own builder decides by itself which names there are.
    builder = getattr(train_spec.build_optimizers_fn, "__module__", "")
    name, known = job_config.optimizer.name, ("Adam", "AdamW")
    if builder == "torchtitan.components.optimizer" and name not in known:
        raise ConfigError(
            f"optimizer.name must be one of {', '.join(known)}, got {name!r}{guess(name, known)}"
        )


def check_tokenizer_fits(tokenizer: Any, model_args: Any) -> None:
    """Every token has to have a row in the model's embedding. A larger model is fine."""
    tokens, rows = tokenizer.get_vocab_size(), getattr(model_args, "vocab_size", None)
    if hasattr(tokenizer, "get_vocab"):  # ids may have gaps
        tokens = max(tokens, 1 + max(tokenizer.get_vocab().values(), default=-1))
    if rows is not None and tokens > rows:
        raise ConfigError(
            f"the tokenizer at model.hf_assets_path must not have more tokens than the model, got "
            f"{tokens} tokens and vocab_size {rows}; take the tokenizer that belongs to "
            f"model.flavor, or a flavor with a larger vocabulary"
        )


# --- Helpers ----------------------------------------------------------------------------------


def _value(job_config: JobConfig, key: str) -> Any:
    value: Any = job_config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every (dotted key, value, annotation) of a config section and the sections inside it."""
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{key}.")
        else:
            yield key, value, hints[field.name]


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values that `Literal[...]`, or `Literal[...] | None`, admits; () for other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [member for member in get_args(annotation) if member is not type(None)]
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return (*get_args(members[0]), None)
    return ()


def _checkpoint_folder(job_config: JobConfig) -> str:
    return os.path.join(job_config.job.dump_folder, job_config.checkpoint.folder)


def _own_steps(job_config: JobConfig) -> list[str]:
    """Names of the step folders of this run; a started run without any has a folder, too."""
    return sorted(glob.glob("step-*", root_dir=_checkpoint_folder(job_config)))


def _looks_local(path: str) -> bool:
    """Whether `path` means a place on this machine, and not a hub dataset like owner/name."""
    if "://" in path:
        return False
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        # A hub name has at most one slash; a bare word may be an old hub name or a file.
        return "/" in path or "." in path
    owner, name = path.split("/")
    return os.path.isdir(owner) or name.endswith((".json", ".jsonl", ".txt", ".parquet"))
