"""Train twice and compare the losses step by step, for two commits, configs, options or layouts.

    # this tree against main
    python scripts/loss_compare.py main . --steps 20
    # FSDP against DDP, on two processes
    python scripts/loss_compare.py . . --baseline-ngpus 2 --test-options \\
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=1"
    # this tree against stored losses
    python scripts/loss_compare.py . . --export-result losses.txt
    python scripts/loss_compare.py . . --import-result losses.txt --assert-equal

Both runs are deterministic, have seed 42 and start from the same weights, those of a seed
checkpoint that the baseline makes on one process. Each data-parallel rank reads its own documents,
so both runs need the same number of these ranks. The test's options default to the baseline's. A
commit other than "." (this tree as it is) is checked out into a temporary folder.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEBUG_CONFIG = "torchtitan/models/llama3/train_configs/debug_model.toml"
LOSS = "loss_metrics/global_avg_loss"

Losses = dict[int, float]
"""step -> loss of the global batch"""


@dataclass(frozen=True)
class Scenario:
    """One of the two runs. commit: "." is this tree as it is."""

    commit: str
    config: str
    options: str
    train_file: str
    ngpus: int


class ComparisonError(Exception):
    """The comparison cannot be made; the message says why."""


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    if commit == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", str(tree), commit], capture_output=True, text=True
        )
        if added.returncode != 0:
            raise ComparisonError(f"no commit {commit!r} to check out: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def train(scenario: Scenario, flags: list[str], ngpus: int, log: Path) -> None:
    """Run a training job and append its output to `log`; ComparisonError if it fails."""
    command = [sys.executable, "-m"]
    if ngpus > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ngpus}", "-m"]
    command += [scenario.train_file, f"--job.config_file={scenario.config}"]
    # The last flag wins, so `flags` come behind the options.
    command += [*shlex.split(scenario.options), *flags]
    print(f"$ {shlex.join(command[1:])}", flush=True)
    with tree_of(scenario.commit) as tree, log.open("a") as output:
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode != 0:
        end = log.read_text().strip().splitlines()[-5:]
        raise ComparisonError("\n".join([f"training failed; the end of {log}:", *end]))


def make_seed_checkpoint(baseline: Scenario, folder: Path) -> Path:
    """Return the step folder with the weights that both runs start from."""
    kinds = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    kinds += ("pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
    flags = [
        "--debug.seed=42",
        f"--job.dump_folder={folder}",
        "--checkpoint.enable",
        "--checkpoint.create_seed_checkpoint",
        *(f"--parallelism.{kind}_degree=1" for kind in kinds),
    ]
    train(baseline, flags, 1, folder / "seed.log")
    return folder / "checkpoint" / "step-0"


def losses_of(scenario: Scenario, name: str, folder: Path, steps: int, seed: Path | None) -> Losses:
    dump_folder = folder / name
    flags = [
        "--debug.deterministic",
        "--debug.seed=42",
        f"--job.dump_folder={dump_folder}",
        f"--training.steps={steps}",
        "--metrics.enable_jsonl",
        "--metrics.log_freq=1",
    ]
    if seed is not None:
        flags += ["--checkpoint.enable", "--checkpoint.load_only"]
        flags.append(f"--checkpoint.initial_load_path={seed}")
    train(scenario, flags, scenario.ngpus, folder / f"{name}_training.log")
    lines = (dump_folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: float(record[LOSS]) for record in records if LOSS in record}


def read_losses(path: str) -> Losses:
    """Return the losses in a file of lines `step loss`."""
    rows = [line.split() for line in Path(path).read_text().splitlines()]
    return {int(step): float(loss) for step, loss in rows}


def compare(baseline: Losses, test: Losses) -> tuple[str, bool]:
    """Return (report, whether both have the same steps, and the same losses to the last bit)."""
    common = sorted(baseline.keys() & test.keys())
    lines = [f"{'step':>6} {'baseline':>12} {'test':>12} {'difference':>11}"]
    lines += [
        f"{step:6} {baseline[step]:12.6f} {test[step]:12.6f} {test[step] - baseline[step]:11.2e}"
        for step in common
    ]
    # `not ==` because nan differs from everything, even from nan.
    differing = [step for step in common if not baseline[step] == test[step]]  # noqa: SIM201
    alone = sorted(baseline.keys() ^ test.keys())
    if alone:
        lines.append(f"steps of only one of the two runs: {', '.join(map(str, alone))}")
    if differing:
        largest = max(abs(test[step] - baseline[step]) for step in differing)
        lines.append(
            f"{len(differing)} of {len(common)} losses differ, first at step {differing[0]}, "
            f"by {'nan' if math.isnan(largest) else f'{largest:.2e}'} at most"
        )
    elif common:
        lines.append(f"all {len(common)} losses are equal")
    return "\n".join(lines), bool(common) and not differing and not alone


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline_commit", help='commit, or "." for this tree as it is')
    parser.add_argument("test_commit", help="the same")
    parser.add_argument("--baseline-config", default=DEBUG_CONFIG, help="TOML file")
    parser.add_argument("--test-config", help="default: the baseline's")
    parser.add_argument("--baseline-options", default="", help="config overrides")
    parser.add_argument("--test-options", help="default: the baseline's")
    parser.add_argument("--baseline-train-file", default="torchtitan.train", help="module to run")
    parser.add_argument("--test-train-file", help="default: the baseline's")
    parser.add_argument("--baseline-ngpus", type=int, default=1, help="processes")
    parser.add_argument("--test-ngpus", type=int, help="default: the baseline's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-seed-checkpoint", action="store_true", help="weights from the seed")
    parser.add_argument("--output-folder", help="keep logs and metrics here; must not exist")
    parser.add_argument("--assert-equal", action="store_true", help="exit code 1 if losses differ")
    parser.add_argument("--export-result", metavar="FILE", help="write the test's losses here")
    parser.add_argument("--import-result", metavar="FILE", help="take the baseline's from here")
    args = parser.parse_args(arguments)
    for name in ("config", "options", "train_file", "ngpus"):
        if getattr(args, f"test_{name}") is None:
            setattr(args, f"test_{name}", getattr(args, f"baseline_{name}"))
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    baseline, test = _scenarios(args)
    if args.import_result and args.export_result:
        raise ComparisonError("--import-result and --export-result exclude one another; drop one")
    if baseline == test and not (args.export_result or args.import_result or args.assert_equal):
        raise ComparisonError(
            "baseline and test are the same run; change one, or use --assert-equal to check that a run "
            "repeats itself"
        )


def _scenarios(args: argparse.Namespace) -> tuple[Scenario, Scenario]:
    names = ("commit", "config", "options", "train_file", "ngpus")
    of = {
        who: Scenario(*(getattr(args, f"{who}_{name}") for name in names))
        for who in ("baseline", "test")
    }
    return of["baseline"], of["test"]


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Train and compare; returns whether the losses are equal."""
    baseline, test = _scenarios(args)
    seed = None if args.no_seed_checkpoint else make_seed_checkpoint(baseline, folder)
    expected = None
    if args.import_result:
        expected = read_losses(args.import_result)
    elif not args.export_result:
        expected = losses_of(baseline, "baseline", folder, args.steps, seed)
    losses = losses_of(test, "test", folder, args.steps, seed)
    if args.export_result:
        text = "".join(f"{step} {loss!r}\n" for step, loss in losses.items())
        Path(args.export_result).write_text(text)
        print(f"{len(losses)} losses written to {args.export_result}")
    if expected is None:
        return True
    report, is_equal = compare(expected, losses)
    (folder / "comparison_statistics.txt").write_text(report + "\n")
    print(report)
    return is_equal


def main() -> None:
    try:
        args = parse_arguments()
        with contextlib.ExitStack() as stack:
            folder = args.output_folder or stack.enter_context(tempfile.TemporaryDirectory())
            if args.output_folder:
                os.makedirs(folder)  # must not exist
            is_equal = run(args, Path(folder).resolve())
    except ComparisonError as error:
        raise SystemExit(f"error: {error}") from error
    if args.assert_equal and not is_equal:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
