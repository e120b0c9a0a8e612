"""Reinforcement learning from the command line.

    torchtitan rl job.toml --nproc 8              # or one process, without --nproc
    torchrun --nproc-per-node 8 -m torchtitan.rl.train --job.config_file job.toml

The config has the sections of `torchtitan.train` and the `[rl]` sections (`torchtitan.rl.job_config`); exit
codes are the same. --help and config errors need no slow import except torch.
"""

from torchtitan.tools import signals

if __name__ == "__main__":
    # Listen for signals before the slow imports.
    signals.at_start.start()

from torchtitan import train
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig
from torchtitan.tools.lazy_names import load_on_access

# Imports torch, so it is loaded after the config is checked.
__getattr__ = load_on_access(__name__, {"build_part": "torchtitan.rl.controller"})


def main() -> None:
    """Read the command line and train."""
    train.main(
        lambda config: __getattr__("build_part")(config),
        config_cls=JobConfig,
        check_config=check_rl_config,
    )


if __name__ == "__main__":
    main()
