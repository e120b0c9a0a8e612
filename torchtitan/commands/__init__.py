"""The command `torchtitan`. A subcommand's module is imported when the subcommand is called."""

import argparse
import contextlib
import difflib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple


class Command(NamedTuple):
    """function: "module:name". trains: True if the command can run on several processes (--nproc)."""

    help: str
    function: str
    trains: bool = False


COMMANDS = {
    "train": Command(
        "train a model; without a TOML file, a small one on Python's own documentation",
        "torchtitan.commands.train:main",
        trains=True,
    ),
    "preflight": Command(
        "check a job's machines before it starts: links, clocks, disks, versions",
        "torchtitan.commands.preflight:main",
        trains=True,
    ),
    "generate": Command("continue prompts, or chat", "torchtitan.commands.generate:main"),
    "export": Command(
        "write a checkpoint as a Hugging Face or PEFT folder", "torchtitan.commands.convert:export"
    ),
    "import": Command(
        "write a Hugging Face folder as a checkpoint", "torchtitan.commands.convert:import_"
    ),
    "compare": Command(
        "compare a model's logits with those of transformers", "torchtitan.commands.compare:main"
    ),
    "show": Command("print a job's first rows of training data", "torchtitan.data.show:main"),
    "tokenize": Command("write a dataset as token ids", "torchtitan.data.tokenize:main"),
    "estimate": Command(
        "compute a step's memory and communication, without the job's devices",
        "torchtitan.estimate.__main__:main",
    ),
    "plan": Command("rank the layouts of a job on some GPUs", "torchtitan.estimate.plan:main"),
    "launch": Command(
        "print what starts a job with Kubernetes, Slurm, SkyPilot, Ray or torchrun",
        "torchtitan.commands.launch:main",
    ),
    "report": Command("write one HTML page about a run", "torchtitan.report.__main__:main"),
    "rl": Command(
        "train by reinforcement; without a TOML file, a small policy that copies letters",
        "torchtitan.rl.train:main",
        trains=True,
    ),
    "serve": Command(
        "serve a policy over Tinker's HTTP interface", "torchtitan.rl.serve:main", trains=True
    ),
}


_PACKAGE = files("torchtitan")
# The job that `train` and `show` use by default.
DEFAULT_JOB = _PACKAGE / "models/llama3/train_configs/python_docs.toml"


def main() -> None:
    """Run the command that the arguments name. Exit code 2 for an unknown command."""
    name, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        lines = [f"  {name:10}{command.help}" for name, command in COMMANDS.items()]
        print("usage: torchtitan COMMAND [options]\n", *lines, sep="\n")
        print("\n`torchtitan COMMAND --help` lists a command's options.")
        print("train, preflight, rl, serve and show take a job's TOML file as first argument.")
        print("train, preflight, rl and serve start N processes with `--nproc N`.")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        print(f"error: torchtitan has no command {name!r}{hint} (see --help)", file=sys.stderr)
        sys.exit(2)
    module, _, function = COMMANDS[name].function.partition(":")
    if COMMANDS[name].trains:
        parser = argparse.ArgumentParser(
            prog=f"torchtitan {name}", add_help=False, allow_abbrev=False
        )
        parser.add_argument("--nproc", type=int, default=1)
        options, arguments = parser.parse_known_args(arguments)
    if (COMMANDS[name].trains or name == "show") and arguments and arguments[0][:1] != "-":
        arguments[0] = f"--job.config_file={arguments[0]}"
    default = {"show": DEFAULT_JOB, "rl": _PACKAGE / "rl/train_configs/copy_cpu.toml"}.get(name)
    if default and not names_job(arguments):
        arguments.insert(0, f"--job.config_file={default}")
    sys.argv = [f"torchtitan {name}", *arguments]
    # As with `python -m`, a job may import modules from the current folder.
    sys.path.append(os.getcwd())
    if COMMANDS[name].trains:
        from torchtitan.tools import signals

        if options.nproc != 1:
            return start_ranks(module, options.nproc, arguments)
        # Handle signals before the imports, which take seconds.
        signals.at_start.start()
    getattr(importlib.import_module(module), function)()


def names_job(arguments: list[str]) -> bool:
    """Return True if the arguments name a job's TOML file, or ask for help."""
    flags = {argument.partition("=")[0] for argument in arguments}
    return not flags.isdisjoint(("--job.config_file", "--job.config-file", "-h", "--help"))


def start_ranks(module: str, nproc: int, arguments: list[str]) -> None:
    """Run a module on several processes of this machine. LOG_RANK lists the ranks whose output is shown."""
    if nproc < 1:
        sys.exit(f"error: --nproc must be at least 1, got {nproc}")
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    shown = os.environ.setdefault("LOG_RANK", "0")
    from torchtitan.tools import launch

    launch.main(
        [
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            *([] if shown == "all" else [f"--local-ranks-filter={shown}"]),
            *("--role=rank", "--tee=3", "-m", module, *arguments),
        ]
    )


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn a user's mistake into one line on stderr. Exit code 2 for a mistake in the config, 1 for others."""
    from torchtitan.tools.errors import RunError
    from torchtitan.tools.events import exit_code

    # These commands run on one process.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        yield
    except (ValueError, OSError, FloatingPointError, RunError, ImportError) as error:
        print(f"error: {getattr(error, 'sentence', error)}", file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


class SourceParser(argparse.ArgumentParser):
    """Parses the options of a command that takes a model or a job, its SOURCE (see `source.job_of`).

    A flag with a dot is a config override; the argument after it is its value.
    """

    def __init__(self, program: str, description: str | None, *more: str) -> None:
        source = "SOURCE" if more else "[SOURCE]"
        super().__init__(
            prog=program,
            usage=" ".join(["%(prog)s", source, *more, "[options] [config overrides]"]),
            description=(description or "").partition("\n")[0],
            epilog="All other options are config overrides, like --training.seq_len 1024.",
            allow_abbrev=False,
        )
        self.add_argument(
            "source",
            nargs=None if more else "?",
            metavar="SOURCE",
            help="a Hugging Face folder, a checkpoint, a run's PEFT folder, the folder of a run (default: "
            "./outputs), or a job's TOML file, for the run in its job.dump_folder",
        )
        self.add_argument(
            "--config",
            "--job.config_file",
            metavar="TOML",
            help="the job's TOML file; default: SOURCE's config.json, or what its run recorded",
        )

    def options_and_overrides(self) -> tuple[argparse.Namespace, list[str]]:
        own, overrides = [], []
        arguments = sys.argv[:0:-1]
        while arguments:
            argument = arguments.pop()
            flag, equals, _ = argument.partition("=")
            is_override = flag.startswith("--") and "." in flag and flag != "--job.config_file"
            (overrides if is_override else own).append(argument)
            if is_override and not equals and arguments and not arguments[-1].startswith("--"):
                overrides.append(arguments.pop())
        return self.parse_args(own), overrides
