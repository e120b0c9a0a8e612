"""AdamW and Muon at equal CPU time: validation loss of the debug model on real text.

    python benchmarks/optimizers.py                          # 500 steps of Muon, three seeds
    python benchmarks/optimizers.py --steps 100 --seeds 0 --adamw 1e-3 2e-3 --muon 2e-3 4e-3

First both optimizers take steps in turn, for the ratio of their CPU-seconds per step. Muon then
trains for `--steps` steps, and AdamW for that ratio times as many, with the same schedule over its
own steps. Each rate is tried with each seed. The data are the documents of `python_docs`; the loss
is the mean over `python_docs_validation`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

VALIDATION_LOSS = "validation_metrics/loss"


def flags_of(name: str, rate: float, seed: int, steps: int, rows: int, folder: str) -> list[str]:
    return [
        f"--job.dump_folder={folder}",
        f"--optimizer.name={name}",
        f"--optimizer.lr={rate}",
        f"--lr_scheduler.warmup_steps={steps // 20}",
        "--lr_scheduler.min_lr_factor=0.1",
        f"--training.local_batch_size={rows}",
        "--training.seq_len=256",
        f"--training.steps={steps}",
        "--training.dataset=python_docs",
        "--training.shuffle",
        "--training.mixed_precision_param=float32",
        "--activation_checkpoint.mode=none",
        f"--debug.seed={seed}",
        f"--training.data_seed={seed}",
        "--metrics.log_freq=10",
        "--validation.enable",
        f"--validation.freq={steps}",
        "--validation.steps=-1",
    ]


def build_trainer(flags: list[str]):
    import torch

    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    torch.set_num_threads(1)

    class TimedTrainer(Trainer):
        cpu_seconds = 0.0

        def train_step(self, data_iterator) -> None:
            start = time.process_time()
            super().train_step(data_iterator)
            self.cpu_seconds += time.process_time() - start

    return TimedTrainer(ConfigManager().parse_args(flags))


def train(flags: list[str], folder: str) -> tuple[float, float]:
    """Return (validation loss at the end, CPU-seconds of the training steps)."""
    trainer = build_trainer(flags)
    trainer.train()
    trainer.close()
    (path,) = Path(folder).rglob("metrics.jsonl")
    records = map(json.loads, path.read_text().splitlines())
    losses = [record[VALIDATION_LOSS] for record in records if VALIDATION_LOSS in record]
    return losses[-1], trainer.cpu_seconds


def seconds_of_steps(all_flags: list[list[str]], turns: int) -> list[float]:
    """Return the median CPU-seconds of a step for each job; they take steps in turn."""
    trainers = [build_trainer(flags) for flags in all_flags]
    batches = [trainer.batch_generator(trainer.dataloader) for trainer in trainers]
    seconds: list[list[float]] = [[] for _ in trainers]
    for turn in range(turns + 2):
        for trainer, data, measured in zip(trainers, batches, seconds, strict=True):
            before = trainer.cpu_seconds
            trainer.step += 1
            trainer.train_step(data)
            if turn >= 2:
                measured.append(trainer.cpu_seconds - before)
    for trainer in trainers:
        trainer.close()
    return [statistics.median(measured) for measured in seconds]


def in_new_process(function, *arguments):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=8, help="of 256 tokens, in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--adamw", type=float, nargs="*", default=[2e-3], help="rates")
    parser.add_argument("--muon", type=float, nargs="*", default=[4e-3], help="rates")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:

        def flags(name: str, rate: float, seed: int, steps: int, folder: str) -> list[str]:
            return flags_of(name, rate, seed, steps, options.rows, f"{root}/{folder}")

        jobs = [flags(name, 1e-3, 0, options.steps, f"timed {name}") for name in ("AdamW", "Muon")]
        adamw, muon = in_new_process(seconds_of_steps, jobs, options.turns)
        print(f"Python {sys.version.split()[0]}, {options.rows} rows of 256 tokens, one thread")
        print(f"CPU-seconds of a step: AdamW {adamw:.3f}, Muon {muon:.3f} ({muon / adamw:.2f})")
        steps_of = {"AdamW": round(options.steps * muon / adamw), "Muon": options.steps}
        for name, rates in (("AdamW", options.adamw), ("Muon", options.muon)):
            for rate in rates:
                losses = []
                for seed in options.seeds:
                    folder = f"{name} {rate} {seed}"
                    job = flags(name, rate, seed, steps_of[name], folder)
                    loss, seconds = in_new_process(train, job, f"{root}/{folder}")
                    losses.append(loss)
                    print(
                        f"{name:6} lr {rate:g}, seed {seed}: loss {loss:.4f} after "
                        f"{steps_of[name]} steps, {seconds:.0f} CPU-seconds",
                        flush=True,
                    )
                print(f"{name:6} lr {rate:g}: mean loss {statistics.mean(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
