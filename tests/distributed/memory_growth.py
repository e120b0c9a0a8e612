"""Resident memory of a training process over thousands of steps, which should stay as it is.

    python -m tests.distributed.memory_growth [--steps 10000] [--ranks 1 2] [--dataset python_docs]

A Llama 3 of two layers, so small that a step takes milliseconds; several ranks divide it by FSDP.
"In use" is what malloc has handed out and not got back: a leak shows there.
"""

import argparse
import ctypes
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.jobs import flags_in
from torchtitan.testing.gloo import run_ranks

WARM_STEPS = 200
MIB = 1 << 20
JOB = ["--model.args=dim=64, n_layers=2, n_heads=2, n_kv_heads=1"] + flags_in("""
    model.name=llama3 model.flavor=debugmodel training.local_batch_size=1 metrics.log_freq=1000
    training.mixed_precision_param=float32 activation_checkpoint.mode=none debug.seed=0
""")


def write_documents(folder: str) -> str:
    """A file of 1,000 documents of 50 to 100 words each, of a vocabulary of 500."""
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioudlmnrst", k=draw.randint(2, 8))) for _ in range(500)]
    path = Path(folder) / "documents.txt"
    texts = (" ".join(draw.choices(words, k=draw.randint(50, 100))) for _ in range(1000))
    path.write_text("\n\n".join(texts))
    return str(path)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer; uordblks and hblkhd are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_in_use() -> int:
    """0 where the C library doesn't say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def train(options: list[str]) -> dict[int, tuple[int, int]]:
    """Step -> (resident, in use) bytes of this rank, every `WARM_STEPS` steps."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.host import keep_freed_memory, resident_bytes
    from torchtitan.trainer import Trainer

    samples: dict[int, tuple[int, int]] = {}

    class SampledTrainer(Trainer):
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            if self.step % WARM_STEPS == 0:
                samples[self.step] = resident_bytes()[0], bytes_in_use()

    keep_freed_memory()  # as torchtitan.train does
    trainer = SampledTrainer(ConfigManager().parse_args(options))
    trainer.train()
    trainer.close()
    return samples


def run(n_ranks: int, steps: int, dataset: str = "local", seq_len: int = 128) -> list[Any]:
    """What `train` returns, for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            *JOB,
            f"--job.dump_folder={folder}",
            f"--training.dataset={dataset}",
            f"--training.steps={steps}",
            f"--training.seq_len={seq_len}",
        ]
        if dataset == "local":
            options.append(f"--training.dataset_path={write_documents(folder)}")
        return run_ranks(
            train, n_ranks, options, init_process_group=False, timeout_seconds=24 * 3600
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dataset", default="local")
    args = parser.parse_args()
    print(f"| ranks | rank | at step | resident, MiB | in use, MiB |\n{'|---' * 5}|", flush=True)
    for n_ranks in args.ranks:
        ranks = run(n_ranks, args.steps, args.dataset, args.seq_len)
        for rank, samples in enumerate(ranks):
            every = max(1, len(samples) // 10) * WARM_STEPS
            for step, (resident, in_use) in samples.items():
                if step in (WARM_STEPS, args.steps) or step % every == 0:
                    sizes = f"{resident / MIB:.1f} | {in_use / MIB:.1f}"
                    print(f"| {n_ranks} | {rank} | {step:,} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
