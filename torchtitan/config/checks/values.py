"""Rules about single values, and about features that need or exclude one another."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import torch

from torchtitan.config.checks.common import clash, compiled_model, is_path, needs, one_of
from torchtitan.config.fields import Range, settings_of
from torchtitan.config.job_config import Checkpoint, JobConfig, Profiling

# NUL, and halves of surrogate pairs, which Python makes of bad bytes on the command line.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def single_values(job_config: JobConfig) -> Iterator[str]:
    """Choices, ranges and texts. A config built in Python has not been through a parser."""
    for key, value, annotation, default in settings_of(job_config, in_lists=True):
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
            if isinstance(text, str) and _NOT_TEXT.search(text):  # it may get into paths and logs
                yield (
                    f"{key} must be text without NUL characters and in UTF-8, got {text!r}; correct it"
                )
        if is_path(key) and isinstance(value, str) and value.startswith("~"):
            # In flags and TOML it is expanded already, for known users.
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
    yield from one_of("checkpoint.async_mode", checkpoint.async_mode.lower(), modes)
    config = JobConfig(checkpoint=checkpoint)
    # Hugging Face files hold only a model's weights.
    for key, needed in (
        ("initial_load_in_hf", "initial_load_model_only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf"),
        ("last_save_in_hf", "last_save_model_only"),
    ):
        if checkpoint.enable or key.startswith("initial"):
            yield from needs(config, f"checkpoint.{key}", f"checkpoint.{needed}")


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
    yield from one_of(
        "activation_checkpoint.determinism_check", ac.determinism_check, ("default", "none")
    )
    if ac.mode == "memory_budget":
        yield from compiled_model(job_config, "activation_checkpoint.mode = 'memory_budget'")
    if ac.mode == "memory_budget" and ac.visualize_memory_budget_pareto:
        if importlib.util.find_spec("matplotlib") is None:
            yield (
                "activation_checkpoint.visualize_memory_budget_pareto = True has torch draw with "
                "matplotlib, which is not installed: pip install matplotlib, or turn it off"
            )
    for name in job_config.compile.components:
        yield from one_of("each name in compile.components", name, ("model", "loss"))
    backend = job_config.compile.backend
    if job_config.compile.enable and backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())  # loads the compiler
        for problem in one_of("compile.backend", backend, known):
            yield f"{problem}; experimental.custom_import can name a module that registers more"
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
    training = job_config.training
    if training.mixture:
        yield from clash(
            "[[training.mixture]]",
            "has its own datasets, whose passes end at different steps; each table can have the key",
            {"training.dataset_path": training.dataset_path, "training.epochs": training.epochs},
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
