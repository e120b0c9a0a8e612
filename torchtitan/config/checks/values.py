"""Rules about single values, and about features that need or exclude one another."""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from torchtitan.config.checks.common import compile_settings, guess, is_path, value_of
from torchtitan.config.job_config import Checkpoint, JobConfig, Profiling


def choices(job_config: JobConfig) -> Iterator[str]:
    """Values are among the choices; a config built in Python has not been through a parser."""
    for key, value, annotation in settings_of(job_config):
        # Literal[...], or Literal[...] | None
        members = (annotation, *get_args(annotation))
        literal = next((member for member in members if get_origin(member) is Literal), None)
        allowed = (*get_args(literal), *((None,) if type(None) in members else ()))
        if literal is not None and value not in allowed:
            names = ", ".join(map(repr, allowed))
            yield f"{key} must be one of {names}, got {value!r}{guess(value, allowed)}"


# (smallest, largest) value -> keys. Values outside are typing errors, or too large for some library.
# -inf: another rule checks the smallest value.
_RANGES: dict[tuple[float, float], str] = {
    (1, 10**9): "training.seq_len training.local_batch_size training.dataloader.prefetch_factor "
    "validation.seq_len validation.local_batch_size validation.dataloader.prefetch_factor "
    "profiling.profiler_active parallelism.pipeline_parallel_microbatch_size",
    (1, 10**12): "training.steps training.gc_freq validation.freq metrics.log_freq "
    "checkpoint.interval profiling.profile_freq lr_scheduler.total_steps",
    (1, 10**8): "comm.init_timeout_seconds comm.train_timeout_seconds",
    (1, 99): "optimizer.muon.ns_steps",  # torch.optim.Muon's limit
    (0, 1e38): "optimizer.lr optimizer.eps optimizer.weight_decay",  # fp32 holds 3e38
    (0, 10**12): "lr_scheduler.warmup_steps debug.check_document_isolation_freq",
    (0, 10**9): "profiling.profiler_warmup comm.trace_buf_size "
    "parallelism.pipeline_parallel_first_stage_less_layers "
    "parallelism.pipeline_parallel_last_stage_less_layers",
    (0, 10**8): "training.time_limit_minutes",
    (0, 1024): "training.dataloader.num_workers validation.dataloader.num_workers",
    (-1, 10**12): "checkpoint.load_step training.loss_chunk",
    (0, 2**64 - 1): "debug.seed",
    (0, 2**53): "training.data_seed",
    (-math.inf, 10**12): "validation.steps",
    (-math.inf, 10**9): "training.global_batch_size checkpoint.keep_latest_k "
    "parallelism.pipeline_parallel_layers_per_stage parallelism.expert_tensor_parallel_degree",
}
_FRACTIONS = (
    "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor lr_scheduler.init_lr_factor "
    "activation_checkpoint.memory_budget"
)


def numbers(job_config: JobConfig) -> Iterator[str]:
    # Comparisons with nan are false, so each condition states what is allowed: nan then fails.
    for (smallest, largest), keys in _RANGES.items():
        for key in keys.split():
            value = value_of(job_config, key)
            if value is None or smallest <= value <= largest:
                continue
            least = f"a finite number of at least {smallest}"
            wanted = f"at most {largest}" if value > largest else least
            default = value_of(JobConfig(), key)
            yield f"{key} must be {wanted}, got {value}; the default is {default}"
    for key in _FRACTIONS.split():
        value = value_of(job_config, key)
        if value is not None and not 0 <= value <= 1:
            yield f"{key} is a fraction from 0 to 1, got {value}; choose a value in that range"
    for key in ("optimizer.beta1", "optimizer.beta2", "optimizer.muon.momentum"):
        value = value_of(job_config, key)
        if not 0 <= value < 1:
            default = value_of(JobConfig(), key)
            yield f"{key} must be at least 0 and below 1, got {value}; the default is {default}"
    max_norm = job_config.training.max_norm
    if not (0 < max_norm <= 1e38 or max_norm == math.inf):
        wanted = "at most 1e38" if max_norm > 0 else "above 0"
        yield f"training.max_norm must be {wanted}, got {max_norm}; use inf to turn clipping off"


def texts(job_config: JobConfig) -> Iterator[str]:
    """Texts are valid UTF-8 without NUL, because they end up in paths, names and log lines.

    Python turns a bad byte on the command line into half of a surrogate pair, which is not UTF-8.
    """
    for key, value, _ in settings_of(job_config):
        for text in value if isinstance(value, list) else [value]:
            try:
                fits = not isinstance(text, str) or b"\0" not in text.encode()
            except UnicodeEncodeError:
                fits = False
            if not fits:
                yield (
                    f"{key} must be text without NUL characters and in UTF-8, got {text!r}; "
                    "correct it"
                )


def home_folders(job_config: JobConfig) -> Iterator[str]:
    """Paths do not begin with `~`. In flags and TOML it is expanded already, for known users."""
    for key, value, _ in settings_of(job_config):
        if is_path(key) and isinstance(value, str) and value.startswith("~"):
            yield (
                f"{key} must not begin with '~', which was not replaced by a home folder, got "
                f"{value!r}; use os.path.expanduser, or begin with './'"
            )


def checkpoint_settings(checkpoint: Checkpoint) -> Iterator[str]:
    keep = checkpoint.keep_latest_k
    if keep < 0 or keep == 1:
        yield (
            f"checkpoint.keep_latest_k must be 0 (keep all) or at least 2, because the only "
            f"checkpoint would be deleted while the next is still being written, got {keep}; "
            f"use 2 to keep as few as possible"
        )
    modes = get_args(get_type_hints(Checkpoint)["async_mode"])
    if checkpoint.async_mode.lower() not in modes:
        yield (
            f"checkpoint.async_mode must be one of {', '.join(modes)}, got "
            f"{checkpoint.async_mode!r}"
        )
    # Hugging Face files hold only a model's weights.
    for key, needed in (
        ("initial_load_in_hf", "initial_load_model_only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf"),
        ("last_save_in_hf", "last_save_model_only"),
    ):
        is_used = checkpoint.enable or key.startswith("initial")
        if is_used and getattr(checkpoint, key) and not getattr(checkpoint, needed):
            yield (
                f"checkpoint.{key} = True needs checkpoint.{needed} = True, got False; "
                f"set it, or turn checkpoint.{key} off"
            )


def hf_conversion(checkpoint: Checkpoint, model: str) -> Iterator[str]:
    """A model without a state_dict_adapter neither loads nor saves Hugging Face files.

    model: its name in the message.
    """
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        is_used = checkpoint.enable or key.startswith("initial")
        if is_used and getattr(checkpoint, key):
            yield (
                f"checkpoint.{key} = True needs a model that can be converted to Hugging Face "
                f"format, got {model}, which cannot; turn it off"
            )


def features(job_config: JobConfig) -> Iterator[str]:
    checkpoint, ac = job_config.checkpoint, job_config.activation_checkpoint
    if job_config.training.time_limit_minutes and (not checkpoint.enable or checkpoint.load_only):
        yield (
            f"training.time_limit_minutes ends the run with a checkpoint, got checkpoint.enable = "
            f"{checkpoint.enable} and checkpoint.load_only = {checkpoint.load_only}; turn saving on, "
            f"or leave the limit out"
        )
    option = ac.selective_ac_option
    is_number = option.isascii() and option.isdigit() and len(option) <= 9 and int(option) > 0
    if ac.mode == "selective" and option != "op" and not is_number:
        yield (
            f"activation_checkpoint.selective_ac_option must be 'op' or a whole number n of at "
            f"least 1 in quotes (every n-th layer), got {option!r}; the default is '2'"
        )
    if ac.determinism_check not in ("default", "none"):
        yield (
            f"activation_checkpoint.determinism_check must be 'default' or 'none', got "
            f"{ac.determinism_check!r}"
        )
    if ac.mode == "memory_budget" and not job_config.compile.applies_to("model"):
        yield (
            f"activation_checkpoint.mode = 'memory_budget' is carried out by the compiler, got "
            f"{compile_settings(job_config)}; set compile.enable = true with 'model' among its "
            f"components, or mode = 'selective'"
        )
    if ac.mode == "memory_budget" and ac.visualize_memory_budget_pareto:
        if importlib.util.find_spec("matplotlib") is None:
            yield (
                "activation_checkpoint.visualize_memory_budget_pareto = True has torch draw with "
                "matplotlib, which is not installed: pip install matplotlib, or turn it off"
            )
    for name in job_config.compile.components:
        if name not in ("model", "loss"):
            yield f"compile.components can hold 'model' and 'loss', got {name!r}; take it out"
    backend = job_config.compile.backend
    if job_config.compile.enable and backend != JobConfig().compile.backend:
        known = torch.compiler.list_backends(exclude_tags=())  # loads the compiler
        if backend not in known:
            yield (
                f"compile.backend must be a registered backend of torch.compile "
                f"({', '.join(known)}), got {backend!r}{guess(backend, known)}; correct it, or "
                f"register it in the module that experimental.custom_import names"
            )
    yield from profiling_cycle(job_config.profiling)


def unavailable(job_config: JobConfig) -> Iterator[str]:
    """Features of the reference that this version lacks; `--help` does not list their keys."""
    if job_config.fault_tolerance.enable:
        yield (
            "fault_tolerance.enable = True needs replicas under torchft, which this version does not "
            "have; leave it out, and let torchrun --max-restarts start the job again, which continues "
            "from its newest checkpoint"
        )
    backend = job_config.parallelism.expert_parallel_comm_backend
    if backend != "standard":
        yield (
            f"parallelism.expert_parallel_comm_backend must be 'standard', torch's all-to-all, got "
            f"{backend!r}, whose kernels this version does not call; leave it out"
        )


def profiling_cycle(profiling: Profiling) -> Iterator[str]:
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq must be at least profiler_warmup + profiler_active, got "
            f"{profiling.profile_freq} with {profiling.profiler_warmup} + "
            f"{profiling.profiler_active}; set it to {needed} or more"
        )


def data(job_config: JobConfig) -> Iterator[str]:
    """Passes and weights of data sets are above 0, and data that would not be read are not named."""
    training = job_config.training
    passes = {"training.epochs": training.epochs}
    for i, part in enumerate(training.mixture):
        name = f"training.mixture[{i}]"
        passes[f"{name}.epochs"] = part.epochs
        if not 0 < part.weight < math.inf:
            yield (
                f"{name}.weight (of {part.dataset!r}) must be a number above 0, got {part.weight}; leave "
                "the table out to train without it"
            )
    for key, value in passes.items():
        if value is not None and not 0 < value < 1e9:
            yield f"{key} is a number of passes over the data above 0, got {value}; correct it"
    if training.mixture and training.dataset_path:
        yield (
            f"training.dataset_path = {training.dataset_path!r} would not be read beside "
            "[[training.mixture]]; make it a table of the mixture, or leave it out"
        )
    if training.mixture and training.epochs is not None:
        yield (
            f"training.epochs = {training.epochs} has no meaning for [[training.mixture]], whose sources "
            "end at different steps; set training.steps, and `epochs` in the tables to limit a source"
        )
    if training.mixture and job_config.validation.enable and job_config.validation.dataset is None:
        yield (
            "validation.dataset must be named beside [[training.mixture]], because a mixture has no "
            "held-out part, got None; set it and validation.dataset_path"
        )


def validation(job_config: JobConfig) -> Iterator[str]:
    training, section = job_config.training, job_config.validation
    if section.enable and (section.seq_len or 0) > training.seq_len:
        yield (
            f"validation.seq_len must not be above training.seq_len, for which the model's positions "
            f"are computed, got {section.seq_len} with {training.seq_len}; set it to "
            f"{training.seq_len} or less"
        )
    if section.steps < 1 and section.steps != -1:
        yield (
            f"validation.steps must be at least 1, or -1 for all of the data, got {section.steps}; "
            f"the default is {JobConfig().validation.steps}"
        )


# Each rule about all settings reads the hints of all sections, which takes 2 ms.
_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def settings_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, annotation) of a config section and the sections inside it."""
    hints = _type_hints(type(section))
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.")
        else:
            yield key, value, hints[field.name]
