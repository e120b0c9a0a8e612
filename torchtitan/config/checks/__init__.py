"""Rules that a config must obey.

A rule is a generator that reads the config and yields a message for each problem, with the key, its value
and what to change. It touches no device, process group or data. The first message becomes a ConfigError.
"""

from collections.abc import Collection
from typing import Any

from torchtitan.config.checks import files, layout, model, values
from torchtitan.config.checks.common import refuse
from torchtitan.config.job_config import JobConfig
from torchtitan.tools.errors import ConfigError  # noqa: F401 (other modules import it from here)


def check_job_config(
    job_config: JobConfig,
    world_size: int | None = None,
    known_converters: Collection[str] | None = None,
    builds_data: bool = True,
) -> None:
    """Raise ConfigError for the first broken rule that does not depend on the model.

    world_size: number of processes; None skips the rules that depend on it.
    known_converters: the registered names; None skips their check.
    builds_data: False for an engine without a trainer, which reads no data and writes fewer files.
    """
    parallelism = job_config.parallelism
    pp, ep = parallelism.pipeline_parallel_degree, parallelism.expert_parallel_degree
    refuse(
        values.single_values(job_config),
        values.checkpoint_settings(job_config.checkpoint),
        values.features(job_config),
        values.data(job_config),
        values.lora(job_config),
        values.loss(job_config, builds_data),
        values.optimizer(job_config),
        layout.tensor_parallel(job_config),
        layout.early_step(job_config.optimizer, pp, ep),
        model.output_in_high_precision(job_config),
        files.addresses(job_config),
        files.checkpoint_folders(job_config),
        files.output_paths(job_config, builds_data),
        files.dataset_paths(job_config) if builds_data else (),
        files.preference_pairs(job_config) if builds_data else (),
    )
    if known_converters is not None:
        refuse(model.converters(job_config, known_converters))
    if world_size is not None:
        check_ranks(job_config, world_size)


def check_ranks(job_config: JobConfig, world_size: int) -> None:
    """Raise ConfigError for the first broken rule that depends on the number of processes."""
    refuse(
        layout.world_size(job_config, world_size),
        layout.ranks_for_experts(job_config, world_size),
        layout.global_batch_size(job_config, world_size),
        files.checkpoint_ranks(job_config, world_size),
        layout.early_step_with_ddp(job_config, world_size),
    )


def check_against_spec(job_config: JobConfig, train_spec: Any, builds_data: bool = True) -> None:
    """Raise ConfigError for the first broken rule that depends on the model's `TrainSpec`."""
    refuse(model.flavor(job_config, train_spec))
    model_args = train_spec.model_args[job_config.model.flavor]
    refuse(
        model.attention(job_config, model_args),
        model.heads(job_config, train_spec, model_args, builds_data),
        model.gradient_reduction(job_config, train_spec, builds_data),
        layout.tensor_parallel_sizes(job_config, model_args),
        layout.experts(job_config, model_args),
        model.converters_of_experts(job_config, model_args),
        files.hf_assets(job_config, builds_data and train_spec.build_tokenizer_fn is not None),
        model.builders(job_config, train_spec),
        layout.context_parallel(job_config, model_args, builds_data),
        layout.pipeline_schedule(job_config),
        layout.pipeline_stages(job_config, train_spec, model_args),
    )


def check_datasets(job_config: JobConfig, known: Collection[str]) -> None:
    """Raise ConfigError for an unregistered dataset, or for local data that does not exist."""
    refuse(files.datasets(job_config, known))


def check_tokenizer_fits(tokenizer: Any, model_args: Any) -> None:
    """Raise ConfigError if a token id has no row in the embedding. Unused rows are allowed."""
    refuse(model.tokenizer(tokenizer, model_args))
