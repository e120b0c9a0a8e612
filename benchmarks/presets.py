"""Trains every debug preset for a few steps, as a user would start it, and says which learn.

    python benchmarks/presets.py [--steps 30] [--only qwen3] [--processes 1 2] [--quick]

Each preset runs on 1 and 2 processes (FSDP), in fp32 and bf16, eager and compiled, one run after
the other, on the documentation of the running Python. The command of each run is shown; a run
that fails, or whose loss does not fall, is listed at the end with the last line it wrote, and
the exit code is 1. --quick: one process, fp32, eager.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = "torchtitan/models/{}/train_configs/{}.toml"
PRESETS: dict[str, tuple[str, list[str]]] = {
    "llama3": (CONFIGS.format("llama3", "python_docs"), []),
    "qwen3": (CONFIGS.format("qwen3", "debug_model"), []),
    "qwen3 MoE": (CONFIGS.format("qwen3", "debug_moe_small"), []),
    "deepseek_v3": (CONFIGS.format("deepseek_v3", "debug_model"), []),
    "llama4": (CONFIGS.format("llama4", "debug_model"), []),
    "llama4 iRoPE": (CONFIGS.format("llama4", "debug_model"), ["--model.flavor=debugmodel_irope"]),
    "gpt_oss": (CONFIGS.format("gpt_oss", "debug_model"), []),
}
# 4 rows of 32 tokens in each step of every run: few, as they all run one after the other.
GLOBAL_BATCH = 4
COMMON = [
    "--training.dataset=python_docs",
    "--training.seq_len=32",
    f"--training.global_batch_size={GLOBAL_BATCH}",
    "--lr_scheduler.warmup_steps=5",
    "--debug.seed=0",
    "--metrics.enable_jsonl",
    "--metrics.log_freq=1",
]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Result:
    """losses: one per step; empty where the run failed. error: the last line it wrote."""

    losses: list[float]
    seconds: float
    error: str

    @property
    def is_falling(self) -> bool:
        """Whether the mean of the last third is below that of the first third."""
        third = max(1, len(self.losses) // 3)
        return bool(self.losses) and sum(self.losses[-third:]) < sum(self.losses[:third])


def command_of(
    preset: str, n_processes: int, dtype: str, compiled: bool, steps: int, folder: str
) -> list[str]:
    config_file, overrides = PRESETS[preset]
    launcher = ["-m"]
    if n_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(n_processes), "-m"]
    return [
        sys.executable,
        *launcher,
        "torchtitan.train",
        f"--job.config_file={config_file}",
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        f"--training.local_batch_size={GLOBAL_BATCH // n_processes}",
        f"--training.mixed_precision_param={DTYPES[dtype]}",
        *COMMON,
        *overrides,
        *(["--compile.enable"] if compiled else []),
    ]


def run(command: list[str], folder: str, timeout_seconds: float) -> Result:
    started = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return Result([], time.monotonic() - started, f"no end after {timeout_seconds:.0f} s")
    seconds = time.monotonic() - started
    if done.returncode != 0:
        return Result([], seconds, _what_failed(done.stderr) or f"exit code {done.returncode}")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    key = "loss_metrics/global_avg_loss"
    return Result([float(json.loads(line)[key]) for line in lines], seconds, "")


def _what_failed(stderr: str) -> str:
    """The line that names the error, or else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "rror: " in line]
    return (named or lines or [""])[0 if named else -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--processes", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--quick", action="store_true", help="one process, fp32, eager")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    args = parser.parse_args()
    modes = args.modes or ["eager", "compiled"]
    variants = list(itertools.product(args.processes, args.dtypes, modes))
    if args.quick:
        variants = [(1, "fp32", "eager")]

    failures = []
    header = (
        f"{'preset':13} {'procs':>5} {'dtype':5} {'mode':8} {'first':>7} {'last':>7} falling wall"
    )
    print(header, flush=True)
    for preset, (n_processes, dtype, mode) in itertools.product(args.only, variants):
        with tempfile.TemporaryDirectory() as folder:
            command = command_of(preset, n_processes, dtype, mode == "compiled", args.steps, folder)
            print("  $ " + " ".join(command[1:]).replace(folder, "OUT"), flush=True)
            result = run(command, folder, args.timeout)
        losses = [f"{result.losses[i]:7.3f}" if result.losses else "      -" for i in (0, -1)]
        name = f"{preset:13} {n_processes:5} {dtype:5} {mode:8}"
        falling = "yes" if result.is_falling else "NO"
        print(f"{name} {' '.join(losses)} {falling:7} {result.seconds:4.0f} s", flush=True)
        if not result.is_falling:
            failures.append(f"{name} {result.error or 'the loss does not fall'}")
    if failures:
        print("\nfailed:\n" + "\n".join(failures))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
