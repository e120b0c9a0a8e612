"""Rules about low-rank adapters, `[lora]`."""

import math
import os
from collections.abc import Iterator

from torchtitan.config.job_config import JobConfig, LoRA

_NAME = "lora"


def lora(job_config: JobConfig) -> Iterator[str]:
    """Rules that need no model; the converter checks names against its layers."""
    settings, converters = job_config.lora, job_config.model.converters
    if _NAME not in converters:
        defaults = LoRA()
        changed = [key for key, value in vars(settings).items() if value != getattr(defaults, key)]
        if changed:
            key = changed[0]
            yield (
                f"lora.{key} = {getattr(settings, key)!r} has no effect without adapters, got "
                f'model.converters = {converters}; add "lora" to it, or remove lora.{key}'
            )
        return
    if converters[-1] != _NAME or converters.count(_NAME) > 1:
        yield (
            f'model.converters must name "lora" once and last, because other converters replace '
            f"layers, got {converters}; reorder it"
        )
    yield from _numbers(settings)
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


def _numbers(settings: LoRA) -> Iterator[str]:
    ranks = {"lora.rank": settings.rank}
    ranks |= {f"lora.rank_pattern[{key!r}]": rank for key, rank in settings.rank_pattern.items()}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            yield (
                f"{key} must be a whole number of at least 1, got {rank!r}; choose one such as 16"
                + _advice(rank)
            )
    alphas = {"lora.alpha": settings.alpha}
    alphas |= {f"lora.alpha_pattern[{key!r}]": x for key, x in settings.alpha_pattern.items()}
    for key, alpha in alphas.items():
        if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            yield (
                f"{key} must be a finite number above 0, got {alpha!r}; 2 * rank is usual"
                + _advice(alpha)
            )
    if not 0 <= settings.dropout < 1:
        yield f"lora.dropout must be at least 0 and below 1, got {settings.dropout}; 0 turns it off"


def _advice(value: object) -> str:
    return ', and quote a name with dots: "layers.0" = 4' if isinstance(value, dict) else ""
