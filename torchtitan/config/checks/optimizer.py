"""Rules about `[optimizer]` beyond the ranges of its numbers."""

import math
import re
from collections.abc import Iterator

from torchtitan.config.checks.common import no_effect
from torchtitan.config.job_config import JobConfig, Muon, ParameterGroup


def groups(job_config: JobConfig) -> Iterator[str]:
    for i, table in enumerate(job_config.optimizer.groups):
        key = f"optimizer.groups[{i}]"
        if not isinstance(table, ParameterGroup):
            yield f"{key} must be a job_config.ParameterGroup, got a {type(table).__name__}; make one"
        if not table.pattern:
            yield f'{key}.pattern must name parameters, got {table.pattern!r}; give one such as "norm"'
        try:
            re.compile(table.pattern)
        except re.error as error:
            yield (
                f"{key}.pattern must be a regular expression, got {table.pattern!r}: {error}; correct "
                "it, or put a backslash before a character that stands for itself"
            )
        if not table.muon and job_config.optimizer.name != "Muon":
            yield (
                f"{key}.muon = False has no effect with optimizer.name = "
                f"{job_config.optimizer.name!r}; remove it, or set the name to 'Muon'"
            )


def muon(job_config: JobConfig) -> Iterator[str]:
    options, name = job_config.optimizer.muon, job_config.optimizer.name
    if name != "Muon":
        why = f"with optimizer.name = {name!r}; set the name to 'Muon'"
        yield from no_effect(job_config, ("optimizer.muon.",), why)
    coefficients = options.ns_coefficients
    if len(coefficients) != 3 or not all(map(math.isfinite, coefficients)):
        yield (
            f"optimizer.muon.ns_coefficients must be three finite numbers, got {coefficients}; the "
            f"default is {Muon().ns_coefficients}"
        )


def state_dtype(job_config: JobConfig) -> Iterator[str]:
    dtype, of_parameters = job_config.optimizer.state_dtype, job_config.training.dtype
    if dtype is not None and of_parameters != "float32":
        yield (
            f"optimizer.state_dtype = {dtype!r} rounds moments that are computed in float32, got "
            f"training.dtype = {of_parameters!r}, in which they are kept anyway; remove it"
        )
