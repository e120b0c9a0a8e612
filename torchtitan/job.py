"""Finds the train spec of a config, and runs all checks that need no device or process group."""

import copy
import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import torchtitan.protocols.train_spec as train_spec_module
from torchtitan.config import JobConfig
from torchtitan.config.checks import (
    check_against_spec,
    check_datasets,
    check_job_config,
    check_ranks,
)
from torchtitan.config.checks.common import import_named, refuse
from torchtitan.config.checks.model import model_sizes
from torchtitan.config.fields import freeze, resolved_job
from torchtitan.config.toml_values import with_values
from torchtitan.distributed.processes.process_group import ranks_in_environment
from torchtitan.models.hf_config import from_hf_config
from torchtitan.protocols.model_converter import known_converter_names
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import ConfigError


class ResolvedJob(NamedTuple):
    """A config that passed all checks and is frozen, and the train spec that it names."""

    config: JobConfig
    train_spec: "train_spec_module.TrainSpec"
    builds_data: bool
    world_size: int
    settings: dict[str, Any]  # the checked values, because lists in a frozen config can change


def resolve_job(
    job_config: JobConfig,
    builds_data: bool = True,
    train_spec: "train_spec_module.TrainSpec | None" = None,
) -> ResolvedJob:
    """Return a checked and frozen copy of the config with its spec; ConfigError if it cannot run.

    A config that this function has returned is returned as it is, unless `train_spec` is given.
    builds_data: False skips the rules for tokenizer and data.
    train_spec: replaces the registered spec of `model.name`.
    """
    known, world_size = resolved_job(job_config), _world_size(job_config)
    if known is not None and train_spec is None and known.world_size == world_size:
        if (known.builds_data or not builds_data) and known.settings == job_config.to_dict():
            return known
    job_config = copy.deepcopy(job_config)
    # Import it before the checks, because the module may register converters.
    _import_custom_module(job_config)
    check_job_config(job_config, None, known_converter_names(), builds_data)
    if train_spec is None:
        train_spec = find_train_spec(job_config)
    else:
        train_spec = _with_sizes(train_spec, job_config)
    check_against_spec(job_config, train_spec, builds_data)
    # Checked last: a degree that does not fit the model is reported before the number of ranks.
    check_ranks(job_config, world_size)
    torch_parts.check(job_config, world_size)
    if builds_data:
        # Skip a builder that wraps another builder (functools.wraps): it has copied the attribute, but may
        # accept other datasets.
        builder, known_datasets = train_spec.build_dataloader_fn, train_spec.registered_datasets
        if known_datasets is None and builder is not None and inspect.unwrap(builder) is builder:
            known_datasets = train_spec.fact("registered_datasets")
        if isinstance(known_datasets, Mapping):
            check_datasets(job_config, known_datasets)
    job = ResolvedJob(job_config, train_spec, builds_data, world_size, job_config.to_dict())
    freeze(job_config, job)
    return job


def find_train_spec(job_config: JobConfig) -> "train_spec_module.TrainSpec":
    """Return the spec of `model.name`, with the sizes of model.hf_config and model.args.

    Raises ConfigError for an unknown name and for invalid sizes.
    """
    _import_custom_module(job_config)
    try:
        # Looked up in the module, because clients replace its `get_train_spec`.
        spec = train_spec_module.get_train_spec(job_config.model.name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _with_sizes(spec, job_config)


def _with_sizes(spec: Any, job_config: JobConfig) -> Any:
    """Return the spec with the sizes in model.hf_config and model.args in place of the flavor's sizes."""
    model = job_config.model
    args = spec.model_args.get(model.flavor)
    if model.hf_config is not None:
        try:
            family, _, args = from_hf_config(model.hf_config)
        except ValueError as error:
            raise ConfigError(f"model.hf_config cannot be used: {error}") from error
        if family != model.name:
            raise ConfigError(
                f"model.hf_config = {model.hf_config!r} describes a {family} model, got model.name = "
                f"{model.name!r}; set model.name to {family!r}"
            )
    if args is None or not (model.args or model.hf_config):
        return spec  # a later check refuses an unknown flavor
    args = with_values(args, model.args, "model.args")
    refuse(model_sizes(args))
    return dataclasses.replace(spec, model_args={**spec.model_args, model.flavor: args})


def _import_custom_module(job_config: JobConfig) -> None:
    if job_config.experimental.custom_import:
        import_named("experimental.custom_import", job_config.experimental.custom_import)


def _world_size(job_config: JobConfig) -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    world_size = ranks_in_environment(job_config.comm)
    if job_config.comm.mode == "default" and "RANK" in os.environ:
        for name, limit in (
            ("RANK", os.environ.get("WORLD_SIZE", "")),
            ("LOCAL_RANK", os.environ.get("LOCAL_WORLD_SIZE", "")),
            ("MASTER_PORT", "65536"),
        ):
            number, has_limit = os.environ.get(name, "0"), limit.isdecimal()
            if not number.isdecimal() or (has_limit and int(number) >= int(limit)):
                raise ConfigError(
                    f"the environment variable {name} must be an integer from 0 up"
                    f"{f' and below {limit}' * has_limit}, got {number!r}; start with torchrun, or set it "
                    "for each process"
                )
    return job_config.trainer_ranks(world_size)
