"""Rules about values of single sections, and about features that need or exclude one another."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from torchtitan.config.checks.common import clash, compiled_model, is_path, needs, no_effect, one_of
from torchtitan.config.fields import Range, settings_of
from torchtitan.config.job_config import Checkpoint, JobConfig, Profiling
from torchtitan.tools import storage

# NUL, and the surrogates with which Python replaces invalid bytes of the command line.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def single_values(section: Any, prefix: str = "") -> Iterator[str]:
    """Check choices, ranges and strings again, because a config built in Python skips the parser."""
    for key, value, annotation, default in settings_of(section, prefix, in_lists=True):
        # Literal[...] or Annotated[..., Range(...)], perhaps with None
        members = (annotation, *get_args(annotation))
        for kind in members:
            if get_origin(kind) is Literal:
                optional = (None,) if type(None) in members else ()
                yield from one_of(key, value, (*get_args(kind), *optional))
            elif get_origin(kind) is Annotated and value is not None:
                for limits in kind.__metadata__:
                    if isinstance(limits, Range) and (problem := limits.problem(value)):
                        yield f"{key} must be {problem}, got {value}; the default is {default}"
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and _NOT_TEXT.search(text):  # unusable in paths and logs
                yield f"{key} must be UTF-8 text without NUL characters, got {text!r}; correct it"
        if is_path(key) and isinstance(value, str) and value.startswith("~"):
            # `ConfigManager` has already expanded `~` in flags and TOML, if the user exists.
            yield f"{key} must not begin with '~', got {value!r}; use os.path.expanduser, or './~'"


def checkpoint_settings(checkpoint: Checkpoint) -> Iterator[str]:
    """Check the section [checkpoint]. Hugging Face files hold only weights, so they need model-only settings."""
    mode: Any = str(checkpoint.async_mode).lower()  # `CheckpointManager` ignores case
    yield from single_values(replace(checkpoint, async_mode=mode), "checkpoint.")
    config = JobConfig(checkpoint=checkpoint)
    for key, needed in (
        ("initial_load_in_hf", "initial_load_model_only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf"),
        ("last_save_in_hf", "last_save_model_only"),
    ):
        if checkpoint.enable or key.startswith("initial"):
            yield from needs(config, f"checkpoint.{key}", f"checkpoint.{needed}")


def hf_conversion(checkpoint: Checkpoint, model: str) -> Iterator[str]:
    """Hugging Face files need a model with a state_dict_adapter. model: the model's name in messages."""
    for key in ("initial_load_in_hf", "last_save_in_hf", "last_save_peft", "save_peft_interval"):
        is_used = checkpoint.enable or key.startswith("initial")
        if is_used and getattr(checkpoint, key):
            value = getattr(checkpoint, key)
            yield f"checkpoint.{key} = {value} needs a state_dict_adapter, got {model}; turn it off"


def features(job_config: JobConfig) -> Iterator[str]:
    checkpoint, ac = job_config.checkpoint, job_config.activation_checkpoint
    if job_config.fault_tolerance.enable:
        yield (
            "fault_tolerance.enable = True is not available; leave it out, and let torchrun "
            "--max-restarts start the job again, which continues from its newest checkpoint"
        )
    if job_config.training.time_limit_minutes and (not checkpoint.enable or checkpoint.load_only):
        yield (
            f"training.time_limit_minutes ends the run with a checkpoint, got checkpoint.enable = "
            f"{checkpoint.enable} and load_only = {checkpoint.load_only}; turn saving on"
        )
    option = ac.selective_ac_option
    if ac.mode == "selective" and option != "op" and not re.fullmatch("[1-9][0-9]{0,8}", option):
        yield (
            f"activation_checkpoint.selective_ac_option must be 'op' or a whole number n of at "
            f"least 1 in quotes (every n-th layer), got {option!r}; the default is '2'"
        )
    if ac.mode == "memory_budget":
        yield from compiled_model(job_config, "activation_checkpoint.mode = 'memory_budget'")
    for name in job_config.compile.components:
        yield from one_of("each name in compile.components", name, ("model", "loss"))
    backend = job_config.compile.backend
    if job_config.compile.enable and backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())  # slow: loads the compiler
        for problem in one_of("compile.backend", backend, known):
            yield f"{problem}; experimental.custom_import can name a module that registers more"
    yield from profiling_cycle(job_config.profiling)


def profiling_cycle(profiling: Profiling) -> Iterator[str]:
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq must be at least profiler_warmup + profiler_active = {needed}, got "
            f"{profiling.profile_freq}; raise it"
        )


def data(job_config: JobConfig) -> Iterator[str]:
    training, validation = job_config.training, job_config.validation
    if training.mixture:
        yield from clash(
            "[[training.mixture]]",
            "has its own datasets, whose passes end at different steps; each table can have the key",
            {"training.dataset_path": training.dataset_path, "training.epochs": training.epochs},
        )
        if validation.enable and validation.dataset is None:
            yield (
                "validation.dataset must be set, because [[training.mixture]] has no held-out part, "
                "got None; set it and validation.dataset_path"
            )
    if validation.enable and (validation.seq_len or 0) > training.seq_len:
        yield (
            f"validation.seq_len must not be above training.seq_len, got {validation.seq_len} with "
            f"{training.seq_len}; set it to {training.seq_len} or less"
        )


def optimizer(job_config: JobConfig) -> Iterator[str]:
    settings, dtype = job_config.optimizer, job_config.training.dtype
    if settings.name != "Muon":
        why = f"with optimizer.name = {settings.name!r}; set the name to 'Muon'"
        yield from no_effect(job_config, ("optimizer.muon.",), why)
    coefficients = settings.muon.ns_coefficients
    if len(coefficients) != 3 or not all(map(math.isfinite, coefficients)):
        yield f"optimizer.muon.ns_coefficients must be three finite numbers, got {coefficients}; correct it"
    for i, table in enumerate(settings.groups):
        key = f"optimizer.groups[{i}]"
        try:
            problem = "" if re.compile(table.pattern) and table.pattern else "it is empty"
        except re.error as error:
            problem = str(error)
        if problem:
            yield (
                f"{key}.pattern must be a regular expression, got {table.pattern!r}: {problem}; correct "
                'it, for example to "norm"'
            )
        if not table.muon and settings.name != "Muon":
            yield (
                f"{key}.muon = False has no effect with optimizer.name = {settings.name!r}; remove it, "
                "or set the name to 'Muon'"
            )
    if settings.state_dtype is not None and dtype != "float32":
        yield (
            f"optimizer.state_dtype = {settings.state_dtype!r} rounds float32 moments, got "
            f"training.dtype = {dtype!r}, in which moments are kept anyway; remove it"
        )


_OF_LOSS = {
    "dpo": ("beta", "label_smoothing", "length_normalized", "reference"),
    "distillation": ("teacher", "divergence", "top_k", "kl_weight", "label_weight", "temperature"),
}


# Values of loss.reference; any other value is a folder with weights.
REFERENCES = ("initial", "adapters_off", "precomputed")


def loss(job_config: JobConfig, builds_data: bool) -> Iterator[str]:
    settings, lora, checkpoint = job_config.loss, job_config.lora, job_config.checkpoint
    if settings.name and not builds_data:
        yield (
            f"loss.name = {settings.name!r} is for a trainer with data; leave it out, and give the engine's "
            "forward_backward_step a loss_fn"
        )
    for loss_name, names in _OF_LOSS.items():
        if settings.name != loss_name:
            keys = tuple(f"loss.{name}" for name in names)
            why = f"with loss.name = {settings.name!r}; set the name to {loss_name!r}"
            yield from no_effect(job_config, keys, why)
    if settings.name == "distillation" and not settings.teacher:
        yield (
            "loss.name = 'distillation' needs loss.teacher, the folder of a Hugging Face model, got ''; set it"
        )
    if settings.name != "dpo":
        return
    converters, reference = job_config.model.converters, settings.reference
    if reference == "adapters_off" and ("lora" not in converters or lora.also_train):
        yield (
            "loss.reference = 'adapters_off' needs adapters and no other trained weights, got "
            f"model.converters = {converters} and lora.also_train = {lora.also_train}; set it to 'initial'"
        )
    has_weights = checkpoint.initial_load_path or checkpoint.initial_load_in_hf
    is_drawn_again = checkpoint.enable and not has_weights and job_config.debug.seed is None
    if reference == "initial" and is_drawn_again:
        yield (
            "loss.reference = 'initial' with random weights, which a resumed run draws again, needs "
            "debug.seed, got None; set it, or load weights with checkpoint.initial_load_path"
        )
    if reference not in REFERENCES and not os.path.isdir(reference):
        yield (
            "loss.reference must be initial, adapters_off, precomputed or a folder with weights, got "
            f"{reference!r} (looked in {os.getcwd()}); correct it"
        )


def lora(job_config: JobConfig) -> Iterator[str]:
    """Rules that need no model; the LoRA converter checks names against the model's layers."""
    settings, converters = job_config.lora, job_config.model.converters
    peft_keys = "checkpoint.last_save_peft", "checkpoint.save_peft_interval"
    if "lora" not in converters:
        why = f'without adapters, got model.converters = {converters}; add "lora" to it'
        yield from no_effect(job_config, ("lora.", *peft_keys), why)
        return
    for key in peft_keys:
        yield from needs(job_config, key, "checkpoint.enable")
    if converters.index("lora") + 1 != len(converters):
        yield (
            f'model.converters must name "lora" once and last, because other converters replace layers, got '
            f"{converters}; reorder it"
        )
    for key, limits in (("rank", Range(1, 10**9)), ("alpha", Range(0, 10**9, excluded=0))):
        for layer, value in getattr(settings, f"{key}_pattern").items():
            problem = limits.problem(value)
            if key == "rank" and not isinstance(value, int):
                problem = "a whole number"
            if problem:
                example = 'write for example "layers.0" = 4, with quotes if the name has dots'
                yield f"lora.{key}_pattern[{layer!r}] must be {problem}, got {value!r}; {example}"
    for key in ("target_modules", "also_train"):
        names = settings.names(getattr(settings, key))
        if not all(name.strip(".") for name in names) or (key == "target_modules" and not names):
            yield f"lora.{key} holds names of layers, got {names}; give one such as q_proj"
    recomputes = job_config.activation_checkpoint
    if settings.dropout and recomputes.mode != "none" and not recomputes.preserve_rng_state:
        yield (
            f"lora.dropout = {settings.dropout} draws random masks, and recomputing would draw other masks "
            "with activation_checkpoint.preserve_rng_state = false; set it to true"
        )
    if settings.base_format is not None:
        key, checkpoint = f"lora.base_format = {settings.base_format!r}", job_config.checkpoint
        if converters != ["lora"]:
            yield f"{key} excludes other converters, got model.converters = {converters}; keep 'lora' only"
        if checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
            yield (
                f"{key} needs a base in Hugging Face files, got checkpoint.initial_load_path = "
                f"{checkpoint.initial_load_path!r}; export it (torchtitan export) and set "
                "checkpoint.initial_load_in_hf = true"
            )
    path = settings.adapter_path
    if path is not None and not storage.is_file(storage.join(path, "adapter_config.json")):
        yield (
            f"lora.adapter_path must be a folder in PEFT's format, with adapter_config.json, got "
            f"{path!r}; correct it"
        )
    if job_config.checkpoint.create_seed_checkpoint:
        yield (
            "checkpoint.create_seed_checkpoint writes a whole model, and a job with LoRA saves only "
            'adapters; remove "lora" from model.converters for this run'
        )
