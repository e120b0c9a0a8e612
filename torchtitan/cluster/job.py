"""A job on several machines, and the command that each of its nodes runs."""

import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from torchtitan.config import JobConfig

# Exit code of ranks that saved and ended before the last step, for `job.stopped_exit_code`.
STOPPED = 75
SERVER_PORT = 8000
SERVED_MODEL = "policy"  # the name of the policy on the vLLM servers

# Variables that keep traffic between nodes on the right interface: network -> variables.
NETWORKS = {
    "tcp": {},
    "infiniband": {"NCCL_IB_HCA": "mlx5"},
    "efa": {"FI_PROVIDER": "efa"},  # needs the plug-in aws-ofi-nccl in the image
}


@dataclass(frozen=True)
class ClusterJob:
    """What every engine has to know of a job.

    config_file, config_text: the job's TOML file. arguments: config overrides, after `with_arguments`.
    module: what the ranks run.
    min_nodes, max_nodes: the nodes that train. The run goes on while at least min_nodes are there.
    gpus: of a node, one rank each; 0: nodes without GPUs, with one rank each. cpus: cores of a rank.
    max_restarts: how often the ranks start again after a failure, from the newest checkpoint.
    grace_seconds: time to finish a step and save, between an engine's first signal and its SIGKILL.
    variables: environment of all ranks.
    servers: nodes that each run a vLLM server of the policy; only for RL.
    """

    name: str
    config: JobConfig
    config_file: str
    config_text: str
    arguments: list[str]
    module: str
    min_nodes: int
    max_nodes: int
    gpus: int
    cpus: int
    max_restarts: int
    grace_seconds: int
    variables: dict[str, str]
    network: str
    servers: int
    image: str
    volume: str
    accelerator: str
    head: str

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def nodes(self) -> str:
        """The number of nodes, as torchrun takes it."""
        low, high = self.min_nodes, self.max_nodes
        return str(high) if low == high else f"{low}:{high}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every rank; the job's own replace the defaults."""
        defaults = {"LOG_RANK": "all", "NCCL_DEBUG": "WARN"} | NETWORKS[self.network]
        if self.gpus:
            defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return defaults | self.variables

    def command(self, python: str, config_file: str, arguments: list[str]) -> list[str]:
        """Return the command of one rank, as shell words."""
        words = [python, "-m", self.module, f"--job.config_file={config_file}"]
        return [shlex.quote(word) for word in [*words, *self.arguments, *arguments]]

    def torchrun(
        self, endpoint: str, is_host: str, config_file: str, arguments: list[str], nodes: str = ""
    ) -> str:
        """Return the shell command of one node: an agent that starts its ranks, and starts them again.

        endpoint: host:port where the agents meet. is_host: shell text, "1" on that host and "0" elsewhere; ""
            compares its name with the node's own.
        nodes: replaces the number of nodes.
        """
        python, *of_rank = self.command("python", config_file, arguments)
        host = f",is_host={is_host}" if is_host else ""
        return " ".join(
            [
                f"{python} -m torchtitan.tools.launch --nnodes={nodes or self.nodes}",
                f"--nproc-per-node={self.ranks_per_node} --max-restarts={self.max_restarts}",
                f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id={self.name}",
                # A node may boot, or wait for its turn, for a while.
                f"--rdzv-conf=join_timeout=1800,read_timeout=180{host}",
                # The console shows the first rank of each node; the files have all ranks.
                f"--log-dir=outputs/logs/{self.name} --tee=3 --local-ranks-filter=0 --role=rank",
                *of_rank,
            ]
        )

    def server_arguments(self, hosts: list[str]) -> list[str]:
        """Return the overrides that have the trainer draw from the vLLM servers on these hosts."""
        if not self.servers:
            return []
        urls = ",".join(f"http://{host}:{SERVER_PORT}" for host in hosts)
        values = {"backend": "openai", "model": SERVED_MODEL, "url": urls}
        return [f"--rl.generator.{key}={value}" for key, value in values.items()]

    def server_command(self, python: str) -> str:
        """Return the shell command of a node's vLLM server, which loads weights from the trainer's files."""
        config: Any = self.config
        options = {
            "model": config.model.hf_assets_path,
            "served-model-name": SERVED_MODEL,
            "max-model-len": config.training.seq_len,
            "tensor-parallel-size": self.ranks_per_node,
            "logprobs-mode": "processed_logprobs",
            "host": "0.0.0.0",
            "port": SERVER_PORT,
        }
        words = [python, "-m", "vllm.entrypoints.openai.api_server"]
        words += [f"--{name}={value}" for name, value in options.items()]
        return "VLLM_SERVER_DEV_MODE=1 " + shlex.join(words)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block, and repeats shared values instead of naming them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Return YAML documents whose keys keep their order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10_000)
