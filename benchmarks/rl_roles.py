"""Two ranks that train and two that generate, against two ranks that do both: curves and steps/s.

    python benchmarks/rl_roles.py [--steps 150] [--seeds 0 1 2] [--ahead 2] [--out FOLDER] [FLAG ...]

The copy task of torchtitan/rl/train_configs/copy_cpu.toml with FSDP on gloo, once per seed and way;
flags such as --rl.task.length=6 change it for all, and --token-seconds adds this time to each token
of a generator, as if its device were slower. In flight, the generating ranks take over new weights
between tokens (rl.generator.in_flight). Prints mean rewards of the last tenth, seconds per step without
the first (of all ranks together: four ranks on two cores share them), how many updates old the episodes
were, and how many versions of the weights drew one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.testing.gloo import run_ranks

PRESET = Path(__file__).resolve().parents[1] / "torchtitan/rl/train_configs/copy_cpu.toml"
# name -> (ranks, of which only generate, further flags)
WAYS = {
    "colocated, 2 ranks": (2, 0, []),
    "2 training, 2 generating": (4, 2, []),
    "the same, in flight": (4, 2, ["--rl.generator.in_flight"]),
}


def run_part(folder: str, flags: list[str], token_seconds: float) -> list[dict[str, float]] | None:
    """What each step logged, on a rank that trains."""
    from torchtitan.config import ConfigManager
    from torchtitan.rl.controller import Controller, build_part
    from torchtitan.rl.generator import DecoderGenerator
    from torchtitan.rl.job_config import JobConfig

    base = [f"--job.config_file={PRESET}", f"--job.dump_folder={folder}", "--rl.eval_every=0"]
    next_version = DecoderGenerator._next_version  # called before each token

    def slow_next_version(generator):
        time.sleep(token_seconds)
        return next_version(generator)

    DecoderGenerator._next_version = slow_next_version
    part = build_part(ConfigManager(JobConfig).parse_args([*base, *flags]))
    rows: list[dict[str, float]] = []
    if isinstance(part, Controller):
        train_step = part.train_step

        def recorded_step() -> None:
            rows.append(train_step() | {"finished": time.perf_counter()})

        part.train_step = recorded_step
    part.train()
    part.close()
    return rows or None


def run(folder: Path, seed: int, way: str, args: argparse.Namespace) -> list:
    n_ranks, n_apart, more = WAYS[way]
    flags = [f"--training.steps={args.steps}", f"--rl.async_steps={args.ahead}"]
    flags += [f"--rl.seed={seed}", f"--debug.seed={seed}", f"--rl.generator.ranks={n_apart}"]
    flags += ["--parallelism.data_parallel_shard_degree=2", "--rl.weight_sync.mode=broadcast"]
    flags += [*more, *args.flags]
    options = {"timeout_seconds": 3600, "init_process_group": False}
    return run_ranks(run_part, n_ranks, str(folder), flags, args.token_seconds, **options)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ahead", type=int, default=2)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args, args.flags = parser.parse_known_args()
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for i, way in enumerate(WAYS):
                rows = run(Path(folder) / f"{seed}_{i}", seed, way, args)
                rewards = [row["rl/reward"] for row in rows]
                curves.setdefault(way, []).append(rewards)
                seconds = (rows[-1]["finished"] - rows[0]["finished"]) / (len(rows) - 1)
                lags: Counter = Counter()
                for row in rows:
                    for name, count in row.items():
                        if name.startswith("rl/episodes_by_lag/"):
                            lags[int(name.rpartition("/")[2])] += int(count)
                last = statistics.fmean(rewards[-max(1, len(rewards) // 10) :])
                print(
                    f"seed {seed}, {way:25} reward {last:.3f}, {1 / seconds:.2f} steps/s, "
                    f"episodes by lag {dict(sorted(lags.items()))}, versions of one "
                    f"{statistics.fmean(row['rl/versions_per_episode'] for row in rows):.2f}",
                    flush=True,
                )
    first, second, _ = curves.values()
    differences = torch.tensor(first) - torch.tensor(second)
    largest = differences.abs().max().item()
    print(f"largest difference of a step's reward between the first two, same seed: {largest:.2e}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "rl_roles.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
