"""Files and commands with which cluster engines (Slurm, Kubernetes, SkyPilot, Ray) start a job."""

import json
import os
import shlex
import sys
from dataclasses import dataclass
from importlib.resources import files
from textwrap import indent
from typing import Any

from jinja2 import Environment, StrictUndefined

from torchtitan.config import JobConfig

# Exit code of ranks that saved and ended before the last step.
STOPPED = 75
_STOPPED_FLAG = f"--job.stopped_exit_code={STOPPED}"
_PORT = 29400  # port at which torchrun's agents find each other
_SERVER_PORT = 8000

# Network -> (environment variables, device requests of a pod). EFA needs the plug-in aws-ofi-nccl in the image.
NETWORKS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "tcp": ({}, {}),
    "infiniband": ({"NCCL_IB_HCA": "mlx5"}, {"rdma/hca": 1}),
    "efa": ({"FI_PROVIDER": "efa"}, {"vpc.amazonaws.com/efa": 1}),
}


@dataclass(frozen=True)
class ClusterJob:
    """What every cluster engine needs to know about a job. options: the options of `torchtitan launch`.

    config_file, config_text: the job's TOML file. arguments: config overrides. module: what each rank runs.
    min_nodes, max_nodes: limits on the number of training nodes; an elastic run continues with min_nodes.
    gpus: GPUs per node, one rank each; 0: one rank per node, on its CPUs.
    environment: variables of all ranks. longest_episode: the longest episode of an RL job, in tokens.
    """

    options: Any
    name: str
    config: JobConfig
    config_file: str
    config_text: str
    arguments: list[str]
    module: str
    min_nodes: int
    max_nodes: int
    gpus: int
    environment: dict[str, str]
    longest_episode: int

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return max(1, self.gpus)

    def command(self, python: str, config_file: str, *arguments: str) -> str:
        """Return the shell command of one rank."""
        words = [python, "-m", self.module, f"--job.config_file={config_file}"]
        return shlex.join([*words, *self.arguments, *arguments])

    def torchrun(
        self, endpoint: str, config_file: str, *arguments: str, is_host: str = "", nodes: str = ""
    ) -> str:
        """Return the shell command of one node: a torchrun agent that starts and restarts the node's ranks.

        endpoint: host:port where the agents meet. is_host: a shell expression, "1" on that host
            and "0" on other nodes; if empty, torchrun compares the host with the node's names and addresses.
        nodes: replaces the number of nodes.
        """
        low, high = self.min_nodes, self.max_nodes
        nodes = nodes or (str(high) if low == high else f"{low}:{high}")
        host = f",is_host={is_host}" if is_host else ""
        of_rank = self.command("python", config_file, *arguments).removeprefix("python ")
        # Nodes may take long to be scheduled and to boot. The console shows the first rank of each node, and
        # the log files show all ranks.
        return (
            f"python -m torchtitan.tools.launch --nnodes={nodes} --nproc-per-node={self.ranks} "
            f"--max-restarts={self.options.max_restarts} --rdzv-backend=c10d --rdzv-endpoint={endpoint} "
            f"--rdzv-id={self.name} --rdzv-conf=join_timeout=1800,read_timeout=180{host} "
            f"--log-dir=outputs/logs/{self.name} --tee=3 --local-ranks-filter=0 --role=rank {of_rank}"
        )

    def filled(self, template: str, **values: object) -> str:
        """Return a Jinja template filled with the values, the options and this job's fields.

        Dicts and lists become JSON, which is also valid YAML.
        """
        server = (
            f"-m vllm.entrypoints.openai.api_server --host=0.0.0.0 --port={_SERVER_PORT} "
            f"--model={shlex.quote(self.config.model.hf_assets_path)} --served-model-name=policy "
            f"--max-model-len={self.longest_episode} --tensor-parallel-size={self.ranks} "
            "--logprobs-mode=processed_logprobs"
        )
        known = vars(self.options) | vars(self) | {"ranks": self.ranks, "stopped": STOPPED}
        # CUDA graphs fail with expandable segments. vLLM would refuse the longest episode, because it counts the
        # last token, which is only a label.
        variables = "-u PYTORCH_ALLOC_CONF VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        known |= {"server": server, "server_port": _SERVER_PORT, "server_env": variables} | values
        environment = Environment(
            undefined=StrictUndefined,
            trim_blocks=True,
            keep_trailing_newline=True,
            comment_start_string="<#",  # Jinja's default {# occurs in Bash's ${#array[@]}
            comment_end_string="#>",
            finalize=lambda x: json.dumps(x) if isinstance(x, dict | list) else x,
        )
        text = files("torchtitan.cluster").joinpath(template).read_text(encoding="utf-8")
        return environment.from_string(text).render(known)


def server_arguments(n_servers: int, urls: str) -> list[str]:
    """Return config overrides that make the trainer sample from the vLLM servers at `urls`, if any."""
    values = {"backend": "openai", "model": "policy", "url": urls}
    return [f"--rl.generator.{key}={x}" for key, x in values.items() if n_servers]


def jobset(job: ClusterJob, has_trainer: bool = False) -> str:
    """Return a ConfigMap and a JobSet of the trainer's pods and, for RL, the servers' pods."""
    options, name = job.options, job.name
    devices = {"nvidia.com/gpu": job.gpus} | NETWORKS[options.network][1] if job.gpus else {}
    hosts = [f"http://{name}-server-0-{i}.{name}:{_SERVER_PORT}" for i in range(options.servers)]
    command = job.torchrun(
        f"{name}-node-0-0.{name}:{_PORT}",
        "/etc/torchtitan/job.toml",
        _STOPPED_FLAG,
        *server_arguments(options.servers, ",".join(hosts)),
        is_host="$((JOB_COMPLETION_INDEX==0))",
    )
    return job.filled(
        "kubernetes.yaml",
        has_trainer=has_trainer,
        toml=indent(job.config_text.rstrip("\n"), "    "),
        command=json.dumps("exec " + command),
        variables=[{"name": key, "value": value} for key, value in job.environment.items()],
        limits={key: str(count) for key, count in devices.items()},
    )


def train_job(job: ClusterJob) -> str:
    """Return a ConfigMap, and a TrainJob of Kubeflow Trainer 2.3 with its runtime, a JobSet."""
    return jobset(job, has_trainer=True)


def sky_task(job: ClusterJob) -> str:
    """Return a task for SkyPilot's managed jobs. Without an image, the nodes install a clone of this project."""
    command = job.torchrun(
        f"\"${{SKYPILOT_NODE_IPS%%$'\\n'*}}\":{_PORT}",
        "HOME/torchtitan_job.toml",
        _STOPPED_FLAG,
        is_host="$((SKYPILOT_NODE_RANK==0))",
        nodes="$SKYPILOT_NUM_NODES",
    ).replace("=HOME/", "=$HOME/")
    return job.filled("skypilot.yaml", command=command)


def batch_script(job: ClusterJob) -> str:
    """Return the script to give to sbatch. Jobs under Slurm are not elastic."""
    drawing = server_arguments(job.options.servers, "URLS")
    command = job.command(sys.executable, job.config_file, *drawing)
    return job.filled(
        "slurm.sbatch",
        nodes=job.max_nodes + job.options.servers,
        world_size=job.max_nodes * job.ranks,
        assignments=_assignments(job),
        command=command.replace("url=URLS", 'url="$urls"'),
        python=sys.executable,
    )


def on_each_node(job: ClusterJob) -> str:
    """Return the command to run on each node, which has the job's TOML file at the same path."""
    host, _, port = job.options.head.partition(":")
    command = job.torchrun(f"{host}:{port or _PORT}", job.config_file)
    return f"env {_assignments(job)} {command.replace('python', sys.executable, 1)}\n"


def _assignments(job: ClusterJob) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in job.environment.items())


def ray_training(job: ClusterJob) -> str:
    """Return the command that submits a training job, with a copy of its TOML file's folder, to Ray."""
    folder, config_file = os.path.split(job.config_file)
    values = {"nodes": job.max_nodes, "gpus": job.gpus, "cpus": job.options.cpus}
    values |= {"max-restarts": job.options.max_restarts, "job.config_file": config_file}
    flags = [f"--{name}={value}" for name, value in values.items()]
    return submit(folder, job.environment, "torchtitan.cluster.ray", *flags, *job.arguments)


def submit(folder: str, variables: dict[str, str], module: str, *arguments: str) -> str:
    """Return the command that runs a module on a Ray cluster, with a copy of the folder."""
    environment = json.dumps({"env_vars": variables})
    words = ["ray", "job", "submit", "--working-dir", folder, "--runtime-env-json", environment]
    return shlex.join([*words, "--", "python", "-m", module, *arguments]) + "\n"
