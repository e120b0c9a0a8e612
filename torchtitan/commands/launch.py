"""Print what starts a job on several machines: a manifest, a script or a command.

    torchtitan launch ENGINE --config job.toml --nodes 4 [options] [config overrides]

| ENGINE | prints | use it with |
|---|---|---|
| kubernetes | TrainJob and ClusterTrainingRuntime of Kubeflow Trainer 2.3 | kubectl apply -f - |
| jobset | JobSet | kubectl apply -f - |
| slurm | batch script | sbatch |
| torchrun | command to run on each node, the first of which is --head | ssh |
| skypilot | task for managed jobs | sky jobs launch |
| ray | command that submits the job to a Ray cluster, for Ray Train | bash |
| verl | command that submits verl's main_ppo with our engine; other arguments are verl's settings | bash |

With --servers, the first three start vLLM servers beside the trainer of an RL job.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from torchtitan.cluster import engines
from torchtitan.cluster.engines import NETWORKS, ClusterJob
from torchtitan.commands import SourceParser, errors_as_sentences
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.checks import check_ranks
from torchtitan.config.checks.common import clash, refuse
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import read_text
from torchtitan.tools.storage import is_address

ENGINES: dict[str, Callable[[ClusterJob], str]] = {
    "kubernetes": engines.train_job,
    "jobset": engines.jobset,
    "slurm": engines.batch_script,
    "torchrun": engines.on_each_node,
    "skypilot": engines.sky_task,
    "ray": engines.ray_training,
}
_ELASTIC = ("kubernetes", "jobset", "torchrun")
_WITH_SERVERS = ("kubernetes", "jobset", "slurm")
# Short enough for a pod's host name, which adds a suffix.
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"


def main() -> None:
    """Print the job for the engine that the first argument names. Exit code 2 for a job that cannot run."""
    engine, *sys.argv[1:] = sys.argv[1:] or ["--help"]
    if engine in ("-h", "--help"):
        print(__doc__)
        sys.argv[1:] = ["--help"]
    elif engine not in ENGINES and engine != "verl":
        known = ", ".join([*ENGINES, "verl"])
        print(f"error: ENGINE must be one of {known}, got {engine!r}", file=sys.stderr)
        sys.exit(2)
    parser = SourceParser("torchtitan launch ENGINE", __doc__)
    add = parser.add_argument
    add("--nodes", required=True, help="number of nodes that train; MIN:MAX for an elastic job")
    add("--gpus-per-node", type=int, default=8, help="0: one rank per node, on its CPUs")
    add("--cpus", type=int, default=12, help="cores per rank (default 12)")
    add("--name", help="name of the job (default: from the TOML file's name)")
    add("--image", default="", help="container image with this package, see the Dockerfile")
    add("--volume", default="", help="claim or volume that all nodes mount as /work, their folder")
    add("--network", choices=NETWORKS, default="tcp", help="network between nodes")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    add("--max-restarts", type=int, default=10, help="restarts after failures (default 10)")
    add("--grace-seconds", type=int, default=600, help="to finish a step and save (default 600)")
    add("--servers", type=int, default=0, help="number of nodes with a vLLM server, for RL")
    add("--accelerator", default="H100", help="GPU type, for skypilot (default H100)")
    add("--head", default="", help="for torchrun: host[:port] of the first node")
    add("--plan", action="store_true", help="take the fastest layout of `torchtitan plan`")
    add("--memory", type=float, default=80, help="for --plan: GiB of one GPU (default 80)")
    with errors_as_sentences():
        if engine == "verl":
            options, settings = parser.parse_known_args()
            settings = [options.source, *settings] if options.source else settings
            used = ("source", "nodes", "gpus_per_node", "network", "env")
            others = {
                f"--{name.replace('_', '-')} = {value!r}"
                for name, value in vars(options).items()
                if name not in used and value not in (parser.get_default(name), "")
            }
            if others:
                raise ConfigError(
                    "verl has settings of its own, and takes --nodes, --gpus-per-node, --network and --env, "
                    f"got {min(others)}; remove it"
                )
            nodes, gpus = _nodes_of(options.nodes, engine)[0], max(1, options.gpus_per_node)
            own = ["model_engine=torchtitan", "trainer.resume_mode=auto"]
            own += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}"]
            variables = NETWORKS[options.network][0] | _variables(options.env)
            main_ppo = "verl.trainer.main_ppo"
            text = engines.submit(".", variables, main_ppo, *own, *settings)
        else:
            text = ENGINES[engine](_job_of(engine, *parser.options_and_overrides()))
    print(text, end="")


def _job_of(engine: str, options: argparse.Namespace, overrides: list[str]) -> ClusterJob:
    """Return the job that the options describe. Raises ConfigError if the engine cannot run it."""
    path = options.config or options.source
    if not path or not os.path.isfile(path):
        raise ConfigError(f"--config must be the job's TOML file, got {path!r}; correct the path")
    text = read_text(path)
    is_rl, config_class = "rl" in tomllib.loads(text), JobConfig
    if is_rl:
        from torchtitan.rl.checks import check_generator
        from torchtitan.rl.job_config import JobConfig as config_class  # noqa: N814
        from torchtitan.rl.job_config import longest_episode
    fewest, most = _nodes_of(options.nodes, engine)
    ranks = max(1, options.gpus_per_node)
    if options.plan:
        if is_rl or fewest != most:
            raise ConfigError(
                "--plan chooses the layout of a training job on a fixed number of nodes, got "
                f"{'an RL job' if is_rl else f'--nodes {options.nodes}'}; set [parallelism] yourself"
            )
        overrides += _planned(path, most * ranks, options.memory, overrides)
    drawing = engines.server_arguments(options.servers, "http://server") if is_rl else []
    config = ConfigManager(config_class).parse_args(
        [f"--job.config_file={path}", *overrides, *drawing]
    )
    for nodes in range(fewest, most + 1):
        try:
            check_ranks(config, config.trainer_ranks(nodes * ranks))
        except ConfigError as error:
            raise ConfigError(f"on {nodes} nodes of {ranks} ranks: {error.sentence}") from error
    name = options.name or re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")
    environment = {"LOG_RANK": "all", "NCCL_DEBUG": "WARN"} | NETWORKS[options.network][0]
    if options.gpus_per_node:
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    job = ClusterJob(
        options,
        name,
        config,
        config_file=os.path.abspath(path),
        config_text=text,
        arguments=overrides,
        module="torchtitan.rl.train" if is_rl else "torchtitan.train",
        min_nodes=fewest,
        max_nodes=most,
        gpus=options.gpus_per_node,
        environment=environment | _variables(options.env),
        longest_episode=longest_episode(config) if is_rl else 0,
    )
    _check(job, engine, is_rl)
    if options.servers:
        check_generator(config)
        keys = ("reload_url", "adapters", "weight_transfer", "replay_experts")
        others = {f"rl.generator.{key}": getattr(config.rl.generator, key) for key in keys}
        refuse(clash("--servers", "starts vLLM without the flags for this setting", others))
    return job


def _nodes_of(text: str, engine: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise ConfigError(f"--nodes must be a number, or MIN:MAX, got {text!r}")
    fewest, _, most = text.partition(":")
    low, high = int(fewest), int(most or fewest)
    if low > high or (low < high and engine not in _ELASTIC):
        raise ConfigError(
            f"--nodes MIN:MAX, with MIN at most MAX, is for {', '.join(_ELASTIC)}, got {text!r} with "
            f"{engine}; give one number"
        )
    return low, high


def _check(job: ClusterJob, engine: str, is_rl: bool) -> None:
    config, options, folder = job.config, job.options, job.config.job.dump_folder
    has_pods = engine in ("kubernetes", "jobset")
    own, bucket = config.checkpoint.places()
    paths = (os.path.normpath(os.path.join("/work", folder, name)) for name in ("", own))
    stays = options.volume and all(Path(path).is_relative_to("/work") for path in paths)
    in_volume = f"got --volume {options.volume!r}, job.dump_folder = {folder!r}"
    kind = f"a TOML file {'with' if is_rl else 'without'} [rl]"
    rules = {
        "the job's name must begin with a letter, have only lower-case letters, digits and dashes, 40 at "
        f"most, and not end with a dash, got {job.name!r}; give another name with --name": (
            not re.fullmatch(_NAME, job.name)
        ),
        f"job.dump_folder must be a folder of the nodes, got {folder!r}; set the address as "
        "checkpoint.folder": is_address(folder),
        "an elastic job needs training.global_batch_size, because otherwise the batch shrinks with the "
        f"nodes, got {config.training.global_batch_size}; set it": (
            job.min_nodes < job.max_nodes and config.training.global_batch_size < 0
        ),
        f"a job that starts again --max-restarts = {options.max_restarts} times needs checkpoint.enable, or "
        f"each attempt begins at step 0, got checkpoint.enable = {config.checkpoint.enable}, "
        f"checkpoint.load_only = {config.checkpoint.load_only}; add --checkpoint.enable, or set "
        "--max-restarts 0": (
            options.max_restarts and (not config.checkpoint.enable or config.checkpoint.load_only)
        ),
        f"--servers needs a TOML file with [rl] and one of {', '.join(_WITH_SERVERS)}, got {engine} and "
        f"{kind}; set --servers 0": options.servers and (engine not in _WITH_SERVERS or not is_rl),
        f"ray runs training jobs, got {kind}; take verl, or another engine": (
            engine == "ray" and is_rl
        ),
        "pods need --image, a container image with this package, got none; build one with the project's "
        "Dockerfile and push it to your registry": has_pods and not options.image,
        f"machines of {engine} come and go, so a job needs a folder that stays: --volume (ReadWriteMany), "
        "which is mounted at /work, with job.dump_folder in /work, or an address as checkpoint.folder, "
        f"{in_volume} and checkpoint.folder = {own!r}; set one": (
            (has_pods or engine == "skypilot") and not stays and not bucket
        ),
        "servers read weights in job.dump_folder, which must be in /work and on a --volume, "
        f"{in_volume}; set them": options.servers and has_pods and not stays,
        "ray copies the working folder to each node, so job.dump_folder must be an absolute path that all "
        f"nodes share, or checkpoint.folder an address, got {folder!r}; set one": (
            engine == "ray" and not os.path.isabs(folder) and not bucket
        ),
        "torchrun needs --head, host[:port] of the first node, got none; set it": (
            engine == "torchrun" and not options.head
        ),
    }
    for sentence, is_broken in rules.items():
        if is_broken:
            raise ConfigError(sentence)


def _variables(pairs: list[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if not re.match(r"[A-Za-z_]\w*=", pair)]:
        raise ConfigError(f"--env must be NAME=VALUE, got {bad[0]!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def _planned(path: str, gpus: int, memory: float, overrides: list[str]) -> list[str]:
    """Return the flags of the fastest layout; the planner runs in another process, and takes minutes."""
    command = [sys.executable, "-m", "torchtitan.estimate.plan", path, f"--gpus={gpus}"]
    done = subprocess.run(
        [*command, f"--memory={memory}", *overrides], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise ConfigError(f"`torchtitan plan` found no layout of {gpus} GPUs; see above")
    words = shlex.split(done.stdout.partition("as flags:\n")[2].partition("\n")[0])
    return [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]
