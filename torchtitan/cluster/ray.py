"""Training by Ray Train, on the Ray cluster that this process belongs to.

    python -m torchtitan.cluster.ray --nodes 4 --gpus 8 --cpus 12 --max-restarts 3 --job.config_file job.toml

Each of Ray's workers is one rank of `torchtitan.train`. Ray Train makes the process group, and restarts all
ranks when one fails.
"""

import argparse
import os
import sys

from torchtitan.config.checks import check_ranks
from torchtitan.config.manager import ConfigManager, exit_on_config_error


def train_rank(arguments: list[str]) -> None:
    """Run `torchtitan.train` as one of Ray's workers, in the process group that Ray Train has made."""
    from torchtitan import train

    sys.argv = ["torchtitan.train", *arguments]
    try:
        train.main()
    except SystemExit as error:  # Ray detects a failure by an exception; the rank has logged it
        if error.code:
            raise RuntimeError(f"torchtitan.train ended with exit code {error.code}") from error


def main() -> None:
    """Check the config and train on Ray's workers. Exits with code 2 if the config cannot run."""
    parser = argparse.ArgumentParser("torchtitan.cluster.ray", allow_abbrev=False)
    for option in ("--nodes", "--gpus", "--cpus", "--max-restarts"):  # GPUs per node, CPUs per rank
        parser.add_argument(option, type=int, required=True)
    options, arguments = parser.parse_known_args()
    n_ranks = options.nodes * max(1, options.gpus)
    with exit_on_config_error():  # check first: Ray would restart the failed ranks
        check_ranks(ConfigManager().parse_args(arguments), n_ranks)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # ranks keep the job's working folder
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    scaling = ScalingConfig(
        num_workers=n_ranks,
        use_gpu=options.gpus > 0,
        resources_per_worker={"CPU": options.cpus} | ({"GPU": 1} if options.gpus else {}),
        placement_strategy="PACK" if options.gpus else "SPREAD",
    )
    TorchTrainer(
        train_rank,
        train_loop_config=arguments,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpus else "gloo"),
        scaling_config=scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_restarts)),
    ).fit()


if __name__ == "__main__":
    main()
