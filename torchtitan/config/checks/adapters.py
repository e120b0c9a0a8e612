"""Rules about low-rank adapters, `[lora]`."""

import os
from collections.abc import Iterator

from torchtitan.config.checks.common import no_effect
from torchtitan.config.fields import Range
from torchtitan.config.job_config import JobConfig

_NAME = "lora"


def lora(job_config: JobConfig) -> Iterator[str]:
    """Rules that need no model; the converter checks names against its layers."""
    settings, converters = job_config.lora, job_config.model.converters
    if _NAME not in converters:
        why = f'without adapters, got model.converters = {converters}; add "lora" to it'
        yield from no_effect(job_config, ("lora.",), why)
        return
    if converters[-1] != _NAME or converters.count(_NAME) > 1:
        yield (
            f'model.converters must name "lora" once and last, because other converters replace '
            f"layers, got {converters}; reorder it"
        )
    for key, limits in (("rank", Range(1, 10**9)), ("alpha", Range(0, 10**9, excluded=0))):
        for layer, value in getattr(settings, f"{key}_pattern").items():
            problem = limits.problem(value)
            if key == "rank" and not isinstance(value, int):
                problem = "a whole number"
            if problem:
                yield (
                    f"lora.{key}_pattern[{layer!r}] must be {problem}, got {value!r}; choose one such as "
                    'in "layers.0" = 4, with the name in quotes if it has dots'
                )
    for key in ("target_modules", "also_train"):
        names = settings.names(getattr(settings, key))
        if any(not name.strip(".") for name in names) or (key == "target_modules" and not names):
            yield (
                f"lora.{key} holds names of layers, such as q_proj, got {names}; give at least one, or "
                '"all-linear"'
            )
    recomputes = job_config.activation_checkpoint
    if settings.dropout and recomputes.mode != "none" and not recomputes.preserve_rng_state:
        yield (
            f"lora.dropout = {settings.dropout} draws random masks, and recomputing would draw others "
            "with activation_checkpoint.preserve_rng_state = false; set it to true"
        )
    path = settings.adapter_path
    if path is not None and not os.path.isfile(os.path.join(path, "adapter_config.json")):
        yield (
            f"lora.adapter_path must be a folder in PEFT's format, with adapter_config.json, got "
            f"{path!r}; correct it"
        )
    if job_config.checkpoint.create_seed_checkpoint:
        yield (
            "checkpoint.create_seed_checkpoint writes a whole model, and a job with adapters saves "
            'only these; remove "lora" from model.converters for this run'
        )
