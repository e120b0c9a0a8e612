"""Functions that several rules share: common checks, and values derived from a config."""

import difflib
import importlib
import math
import operator
import os
import traceback
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import Any

from torchtitan.config.fields import settings_of
from torchtitan.config.job_config import JobConfig
from torchtitan.tools.errors import ConfigError

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)


def refuse(*problems: Iterable[str]) -> None:
    """Raise ConfigError with the first message, if any; later rules do not run."""
    for problem in chain(*problems):
        raise ConfigError(problem)


def problem_in(rule: Any, *arguments: Any) -> list[str]:
    """Return the message of the ValueError that `rule(*arguments)` raises; [] if it raises none."""
    try:
        rule(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def value_of(section: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    return operator.attrgetter(key)(section)


def is_path(key: str) -> bool:
    """True if the key holds a path, judged by the end of its name."""
    return key.endswith(
        ("folder", "path", "file", "_csv", "template", "hf_config", "teacher", "reference")
    )


def guess(name: Any, known: Iterable[Any]) -> str:
    """Return ', did you mean ...?' with the closest known name, ignoring case, or '' if none is close."""
    by_lower = {other.lower(): other for other in known if isinstance(other, str)}
    wanted = str(name).lower()
    # The user may give only the part after the last dot: "float8" for "quantize.linear.float8".
    by_ending = [other for other in by_lower if other.rsplit(".", 1)[-1] == wanted]
    close = by_ending or difflib.get_close_matches(wanted, by_lower, n=1)
    return f", did you mean {by_lower[close[0]]!r}?" if close else ""


def one_of(key: str, value: Any, known: Collection[Any]) -> Iterator[str]:
    """Rule: `value` must be one of the names in `known`."""
    if value not in known:
        names = ", ".join(map(str, known))
        yield f"{key} must be one of {names}, got {value!r}{guess(value, known)}"


def divides(key: str, value: int, what: str, *numbers: int) -> Iterator[str]:
    """Rule: `value` must divide numbers[0], which messages call `what`. Suggestions divide all `numbers`."""
    if numbers[0] % value:
        common = math.gcd(*numbers)
        choices = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        yield f"{key} must divide {what}, got {value} with {numbers[0]}; the choices are {choices}"


def is_file(
    key: str, path: str | None, what: str, remedy: str = "correct the path"
) -> Iterator[str]:
    """Rule: `path` must be a file. what: a description of the file's content, for the message."""
    if path is None or not os.path.isfile(path):
        yield f"{key} must be a file{what}, got {path!r} (looked in {os.getcwd()}); {remedy}"


def needs(config: JobConfig, key: str, needed: str) -> Iterator[str]:
    """Rule: if the setting `key` is on, the setting `needed` must be on."""
    if value_of(config, key) and not value_of(config, needed):
        yield (
            f"{key} = {value_of(config, key)} needs {needed} = True, got {value_of(config, needed)}; "
            f"set it, or turn {key} off"
        )


def clash(key: str, reason: str, others: dict[str, Any]) -> Iterator[str]:
    """Rule: with `key` on, all settings `others` (key -> value) must be off. reason: why, for the message."""
    for other, value in others.items():
        if value:
            yield f"{key} {reason}, got {other} = {value!r}; change one of the two"


def no_effect(config: JobConfig, keys: tuple[str, ...], why: str) -> Iterator[str]:
    """Rule: settings whose keys begin with `keys` must have their defaults. why: the end of the message."""
    for setting in settings_of(config):
        if setting.key.startswith(keys) and setting.value != setting.default:
            yield f"{setting.key} = {setting.value!r} has no effect {why}, or remove it"


def data_sections(job_config: JobConfig) -> dict[str, Any]:
    """Return section name -> section, for each section whose data this job reads."""
    sections: dict[str, Any] = {"training": job_config.training}
    if job_config.validation.enable:
        sections["validation"] = job_config.validation_data
    return sections


def has_experts(model_args: Any) -> bool:
    """True if a model with these args has mixture-of-experts layers."""
    return hasattr(model_args, "moe_args") and getattr(model_args, "moe_enabled", True)


def has_value_head(job_config: JobConfig, model_args: Any) -> bool:
    """True if the job's model outputs values in place of logits."""
    return job_config.model.value_head or getattr(model_args, "value_head", False)


def attn_type_of(job_config: JobConfig, model_args: Any) -> str:
    chosen = job_config.model.attn_type
    return getattr(model_args, "attn_type", "sdpa") if chosen is None else chosen


def compile_settings(job_config: JobConfig) -> str:
    settings = job_config.compile
    return f"compile.enable = {settings.enable} with components {settings.components}"


def compiled_model(job_config: JobConfig, key: str) -> Iterator[str]:
    """Rule: the model must be compiled, because `key` is on."""
    if not job_config.compile.applies_to("model"):
        yield (
            f"{key} needs a compiled model, got {compile_settings(job_config)}; set "
            "compile.enable = true with 'model' among its components, or turn it off"
        )


def shard_degree(job_config: JobConfig, world_size: int) -> int:
    """Return the shard degree; for -1, world_size divided by the other degrees (at least 1)."""
    parallelism = job_config.parallelism
    if parallelism.data_parallel_shard_degree != -1:
        return parallelism.data_parallel_shard_degree
    others = (getattr(parallelism, name) for name in DEGREES if "shard" not in name)
    return max(1, world_size // math.prod(others))


def import_named(key: str, name: str) -> ModuleType:
    """Import the module `name`, the value of the setting `key`; ConfigError if the import fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key} names a module to import, got {name!r}: {error}; give its dotted name, and "
            "put its folder on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} names a module to import, and {name!r} fails at {where.filename}, line "
            f"{where.lineno}: {type(error).__name__}: {error}; correct it there"
        ) from error
