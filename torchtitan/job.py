"""From a config to the train spec it names, with all checks that need no device or process group."""

import os
from collections.abc import Mapping

import torch

import torchtitan.protocols.train_spec as train_spec_module
from torchtitan.config import JobConfig
from torchtitan.config.checks import check_against_spec, check_datasets, check_job_config
from torchtitan.config.checks.common import import_named
from torchtitan.protocols.model_converter import known_converter_names
from torchtitan.tools.errors import ConfigError


def resolve_job(
    job_config: JobConfig,
    builds_data: bool = True,
    train_spec: "train_spec_module.TrainSpec | None" = None,
) -> "train_spec_module.TrainSpec":
    """Return the train spec of the job; raises ConfigError if the job cannot run.

    builds_data: False leaves out the rules for tokenizer, data and their files.
    train_spec: in place of the registered one of `model.name`.
    """
    # Before the checks: it may register converters, which they look up.
    _import_custom_module(job_config)
    check_job_config(job_config, _world_size(job_config), known_converter_names(), builds_data)
    if train_spec is None:
        train_spec = find_train_spec(job_config)
    check_against_spec(job_config, train_spec, builds_data)
    if builds_data:
        # A model's own dataloader may not say which datasets it knows. functools.wraps copies what
        # the wrapped builder says, but the wrapper may take others.
        builder = train_spec.build_dataloader_fn
        known_datasets = getattr(builder, "registered_datasets", None)
        if isinstance(known_datasets, Mapping) and not hasattr(builder, "__wrapped__"):
            check_datasets(job_config, known_datasets)
    return train_spec


def find_train_spec(job_config: JobConfig) -> "train_spec_module.TrainSpec":
    """Return the train spec of `model.name`; raises ConfigError if there is none.

    `experimental.custom_import`, which may register it, is imported first.
    """
    _import_custom_module(job_config)
    try:
        # Looked up through the module: embedders replace `get_train_spec` there.
        return train_spec_module.get_train_spec(job_config.model.name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _import_custom_module(job_config: JobConfig) -> None:
    if job_config.experimental.custom_import:
        import_named("experimental.custom_import", job_config.experimental.custom_import)


def _world_size(job_config: JobConfig) -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    if job_config.comm.mode == "default":
        name, value = "WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")
    else:  # simulated ranks
        name, value = "NGPU", os.environ.get("NGPU", "")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"with comm.mode = {job_config.comm.mode!r} the environment variable {name} is the "
            f"number of ranks, a positive integer, got {value!r}; set it"
        )
    if job_config.comm.mode == "default" and "RANK" in os.environ:
        for name, limit in (
            ("RANK", os.environ.get("WORLD_SIZE")),
            ("LOCAL_RANK", os.environ.get("LOCAL_WORLD_SIZE")),
            ("MASTER_PORT", "65536"),
        ):
            number = os.environ.get(name)
            has_limit = limit is not None and limit.isdecimal()
            if number is None or (
                number.isdecimal() and not (has_limit and int(number) >= int(limit))
            ):
                continue
            raise ConfigError(
                f"the environment variable {name} must be an integer from 0 up"
                f"{f' and below {limit}' if has_limit else ''}, got {number!r}; start with "
                "torchrun, or set it for each process"
            )
    return job_config.trainer_ranks(int(value))
