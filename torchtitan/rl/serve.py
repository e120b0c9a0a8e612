"""A policy behind Tinker's HTTP interface, for programs that use the `tinker` client.

    torchtitan serve job.toml --nproc 8              # or one process, without --nproc
    torchrun --nproc-per-node 8 -m torchtitan.rl.serve --job.config_file job.toml
    TINKER_API_KEY=tml-local python my_loop.py base_url=http://127.0.0.1:8000

On SIGTERM or SIGINT the server finishes the running call, answers waiting requests with an error, and ends.
"""

import os

from torchtitan import train
from torchtitan.rl.checks import check_server_config
from torchtitan.rl.job_config import JobConfig
from torchtitan.tools.lazy_names import load_on_access

# Slow to import, and not needed to report a mistake in the config.
__getattr__ = load_on_access(__name__, {"Server": "torchtitan.integrations.tinker.server"})


def main() -> None:
    """Read the command line and serve. Set a umask that hides written files from other users."""
    os.umask(0o077)
    train.main(
        lambda config: __getattr__("Server")(config),
        config_cls=JobConfig,
        check_config=check_server_config,
    )


if __name__ == "__main__":
    main()
