"""Rules a config has to obey, one function per rule.

Each rule only reads the config and raises `ConfigError` naming the key, the rule, the value it
got and what to change.
"""

from typing import Any

from torchtitan.config.job_config import JobConfig


class ConfigError(ValueError):
    """The config cannot work as it stands; the message says what to change."""


def check_job_config(job_config: JobConfig, world_size: int | None = None) -> None:
    """Raise ConfigError at the first rule the config breaks, as far as it alone can tell.

    world_size: number of processes in the job; None leaves out the rules that depend on it.
    """


def check_against_spec(
    job_config: JobConfig, train_spec: Any, world_size: int | None = None
) -> None:
    """Raise ConfigError at the first rule the config breaks for the model it names.

    train_spec: the `TrainSpec` that belongs to `job_config.model.name`.
    """
