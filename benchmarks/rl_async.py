"""Seconds per RL step where drawing takes about as long as training, by `rl.async_steps`.

    python benchmarks/rl_async.py [--steps 60] [--draw 0.35] [--train 0.35] [--ahead 0 1 2 4]

Real steps of a toy policy on one process, of four samples, slowed down by sleeping: each training
step by --train seconds, each draw by a time of --draw seconds on average, which is log-normal as
completions' lengths are: half of the draws take less than 0.6 of it, one in twenty three times as
much; the same draws each time. As much as the longer of the two has to pass in a step; the sum of
both does if they take turns.
"""

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.unit.rl.toy import toy_config
from torchtitan.rl.controller import Controller
from torchtitan.rl.generator import CopyGenerator


def seconds_per_step(ahead: int, args: argparse.Namespace) -> tuple[float, float, Counter]:
    """(per step, of it in the update of the generator, how many steps had which lag)."""
    rng = random.Random(0)
    draw = CopyGenerator.generate

    def slow_draw(self, *arguments, **options):
        time.sleep(args.draw * rng.lognormvariate(-0.5, 1.0))
        return draw(self, *arguments, **options)

    CopyGenerator.generate = slow_draw
    try:
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--training.steps={args.steps}", "--rl.weight_sync.mode=broadcast"]
            flags += ["--rl.num_prompts_per_step=2", "--rl.num_samples_per_prompt=2"]
            controller = Controller(toy_config(folder, *flags, f"--rl.async_steps={ahead}"))
            learn = controller.trainer.forward_backward

            def slow_learning(batch):
                time.sleep(args.train)
                return learn(batch)

            controller.trainer.forward_backward = slow_learning
            controller.setup()
            controller.train_step()  # nothing is drawn ahead yet
            started = time.perf_counter()
            rows = [controller.train_step() for _ in range(args.steps - 1)]
            seconds = (time.perf_counter() - started) / len(rows)
            controller.close()
    finally:
        CopyGenerator.generate = draw
    updates = statistics.fmean(row["time/update_generator(s)"] for row in rows)
    return seconds, updates, Counter(int(row["rl/lag"]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--draw", type=float, default=0.35)
    parser.add_argument("--train", type=float, default=0.35)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    print(f"{args.steps - 1} steps, drawing {args.draw} s, training {args.train} s, on average")
    for ahead in args.ahead:
        seconds, updates, lags = seconds_per_step(ahead, args)
        shares = ", ".join(f"{lag}: {count}" for lag, count in sorted(lags.items()))
        print(f"async_steps {ahead}: {seconds:.3f} s per step, {updates:.3f} in updates; ", end="")
        print(f"steps by lag {shares}", flush=True)


if __name__ == "__main__":
    main()
