"""Resident memory of a training process over thousands of steps, which should stay as it is.

    python benchmarks/memory_growth.py [--steps 10000] [--ranks 1 2]

The tiny job of tests/reliability, whose steps take milliseconds; several ranks divide it by FSDP.
"""

import argparse
import tempfile

from common import print_header, print_row

from tests.reliability.jobs import TINY_JOB
from torchtitan.testing.gloo import run_ranks

EVERY = 200  # steps


def train(flags: list[str]) -> dict[int, int]:
    """Step -> resident bytes of this rank, without those that malloc keeps for later."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.host import keep_freed_memory, resident_bytes, return_freed_memory
    from torchtitan.trainer import Trainer

    samples = {}

    class SampledTrainer(Trainer):
        def train_step(self, data_iterator) -> None:
            super().train_step(data_iterator)
            if self.step % EVERY == 0:
                return_freed_memory()
                samples[self.step] = resident_bytes()[0]

    keep_freed_memory()  # as torchtitan.train does
    with SampledTrainer(ConfigManager().parse_args(flags)) as trainer:
        trainer.train()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print_header("ranks", "rank", "at step", "resident, MiB")
    how = {"init_process_group": False, "timeout_seconds": 24 * 3600}
    for n_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            flags = [*TINY_JOB, f"--job.dump_folder={folder}", f"--training.steps={args.steps}"]
            ranks = run_ranks(train, n_ranks, [*flags, "--metrics.log_freq=1000"], **how)
        for rank, samples in enumerate(ranks):
            for step, n_bytes in samples.items():
                if step == EVERY or step % max(EVERY, args.steps // 10) == 0:
                    print_row(n_ranks, rank, f"{step:,}", f"{n_bytes / 2**20:.1f}")


if __name__ == "__main__":
    main()
