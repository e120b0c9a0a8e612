"""Jobs on a Ray cluster: training by Ray Train, and verl's RL.

    python -m torchtitan.cluster.ray --nodes 4 --gpus 8 --job.config_file job.toml

Each of Ray's workers is one rank of `torchtitan.train`; Ray Train makes the process group, and starts all
ranks again when one fails.
"""

import argparse
import json
import os
import shlex
import sys
from typing import Any

from torchtitan.cluster.job import ClusterJob
from torchtitan.config.checks import check_ranks
from torchtitan.config.manager import ConfigManager, exit_on_config_error


def submit_training(job: ClusterJob) -> str:
    """Return the command that submits a training job; the folder of its TOML file travels with it."""
    folder, config_file = os.path.split(os.path.abspath(job.config_file))
    words = ["python", "-m", "torchtitan.cluster.ray", f"--nodes={job.max_nodes}"]
    words += [f"--gpus={job.gpus}", f"--cpus={job.cpus}", f"--max-restarts={job.max_restarts}"]
    return _submit(
        folder, job.environment, [*words, f"--job.config_file={config_file}", *job.arguments]
    )


def submit_verl(nodes: int, gpus: int, variables: dict[str, str], settings: list[str]) -> str:
    """Return the command that submits verl's `main_ppo` with our engine. settings: verl's own."""
    words = ["python", "-m", "verl.trainer.main_ppo", "model_engine=torchtitan"]
    words += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={max(1, gpus)}"]
    words += ["trainer.resume_mode=auto", *settings]
    return _submit(".", variables, words)


def _submit(folder: str, variables: dict[str, str], words: list[str]) -> str:
    environment = json.dumps({"env_vars": variables})
    submit = ["ray", "job", "submit", "--working-dir", folder, "--runtime-env-json", environment]
    return shlex.join([*submit, "--", *words]) + "\n"


def train_rank(arguments: list[str]) -> None:
    """Run `torchtitan.train` as one of Ray's workers, in the process group that Ray Train has made."""
    from torchtitan import train

    sys.argv = ["torchtitan.train", *arguments]
    try:
        train.main()
    except SystemExit as error:  # Ray expects an exception, and has the rank's output
        if error.code:
            raise RuntimeError(f"torchtitan.train ended with exit code {error.code}") from error


def main() -> None:
    """Train on the Ray cluster that this process belongs to."""
    parser = argparse.ArgumentParser("torchtitan.cluster.ray", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="per node; 0: one rank on its CPUs")
    parser.add_argument("--cpus", type=int, default=1, help="of each rank")
    parser.add_argument("--max-restarts", type=int, default=0)
    options, arguments = parser.parse_known_args()
    n_ranks = options.nodes * max(1, options.gpus)
    with exit_on_config_error():  # here, because Ray would start a failed rank again
        check_ranks(ConfigManager().parse_args(arguments), n_ranks)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    resources: dict[str, Any] = {"CPU": options.cpus} | ({"GPU": 1} if options.gpus else {})
    scaling = ScalingConfig(
        num_workers=n_ranks,
        use_gpu=options.gpus > 0,
        resources_per_worker=resources,
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
