"""Reinforcement learning from the command line.

    python -m torchtitan.rl.train --job.config_file job.toml             # one process
    torchrun --nproc-per-node 8 -m torchtitan.rl.train --job.config_file job.toml

The config is that of `torchtitan.train` with `[rl]` sections (`torchtitan.rl.job_config`). Config
mistakes and --help answer before anything heavy is imported; exit codes are those of
`torchtitan.train`.
"""

from typing import Any

from torchtitan import train
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig


def main() -> None:
    """Read the command line and train."""

    def build(config: JobConfig) -> Any:
        # Heavy, and a mistake in the config is told without it.
        from torchtitan.rl.controller import build_part

        return build_part(config)

    train.main(build, config_cls=JobConfig, check_config=check_rl_config)


if __name__ == "__main__":
    main()
