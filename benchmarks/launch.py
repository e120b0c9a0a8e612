"""CPU-seconds from launch to the first step, and of imports, --help and config errors.

    python benchmarks/launch.py

Every figure is the least of several fresh processes, user plus system time of one thread. Those
with a sign are beyond `import torch`. torchrun's own time is that of starting two programs that do nothing.
"""

import os
import resource
import subprocess
import sys
import tempfile

TRAIN = ["-m", "torchtitan.train"]
ONE_STEP = [
    "--training.dataset=python_docs",
    *("--training.steps=1", "--training.local_batch_size=4", "--training.seq_len=512"),
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
]


def cpu_seconds(args: list[str], runs: int = 3) -> float:
    def children() -> float:
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # user, system

    seconds = []
    for _ in range(runs):
        before = children()
        subprocess.run(
            [sys.executable, *args],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            cwd=os.path.join(os.path.dirname(__file__), ".."),
        )
        seconds.append(children() - before)
    return min(seconds)


def main() -> None:
    torch_alone = cpu_seconds(["-c", "import torch"])
    print(f"{'import torch':44} {torch_alone:5.2f}")
    cases = {
        "import torchtitan": ["-c", "import torch, torchtitan"],
        "python -m torchtitan.train --help": [*TRAIN, "--help"],
        "  unknown flag": [*TRAIN, "--training.setps=3"],
        "  unknown flavor": [*TRAIN, "--model.flavor=9B"],
        "  unknown dataset": [*TRAIN, "--training.dataset=c5"],
        "  heads not divisible": [*TRAIN, "--parallelism.tensor_parallel_degree=3"],
    }
    for name, args in cases.items():
        print(f"{name:44} {cpu_seconds(args) - torch_alone:+5.2f}")
    folder = tempfile.mkdtemp()
    whole = cpu_seconds([*TRAIN, *ONE_STEP, f"--job.dump_folder={folder}"])
    print(f"{'debug model, 4 x 512: launch to first step':44} {whole:5.2f}")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=localhost:0"]
    launcher = cpu_seconds([*torchrun, "--no-python", "true"])
    ranks = cpu_seconds([*torchrun, *TRAIN, *ONE_STEP, f"--job.dump_folder={folder}"]) - launcher
    print(f"{'  two ranks with FSDP, together':44} {ranks:5.2f} and torchrun's {launcher:.2f}")


if __name__ == "__main__":
    main()
