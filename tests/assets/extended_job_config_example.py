"""A custom config module: only what it adds to, or changes in, the built-in config."""

from dataclasses import dataclass, field


@dataclass
class CustomConfig:
    how_is_your_day: str = "good"
    """A key of a section that the built-in config does not have"""

    num_days: int = 7
    """Another one"""


@dataclass
class Training:
    steps: int = 99
    """A built-in key with another default"""

    my_custom_steps: int = 32
    """A new key in a built-in section"""


@dataclass
class JobConfig:
    custom_config: CustomConfig = field(default_factory=CustomConfig)
    training: Training = field(default_factory=Training)
