"""What splitting a training step over two processes costs, next to the same step on one.

    python benchmarks/parallel_cost.py [--rounds 3] [--layouts "TP 2" "CP 2, alltoall"]

Every layout works through the same global batch of 4 x 512 tokens in fp32: forward, backward and
optimizer step of the debug models. Time is CPU time of all threads (`time.process_time()`), summed
over ranks. A rank that waits sleeps: idle time, a pipeline's bubble say, is not in the ratio.

Layouts take turns, round by round, and the best step of all rounds counts. "1 process" are two
processes at work at the same time, each on whole steps of its own, and the mean of them: cores that
share caches and execution units are as busy as under the other layouts.

Instructions, those of the kernel included, say the same of a machine that has other work besides,
but for how long each takes. They are counted where Linux lets this process (perf_event_open).
"""

import argparse
import ctypes
import os
import platform
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from torchtitan.testing.gloo import run_ranks

ROWS, SEQ_LEN = 4, 512
WARM_UP_STEPS, STEPS = 2, 4
ONE_PROCESS = "1 process"
_FSDP = ["--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=2"]
_CP = ["--parallelism.context_parallel_degree=2"]
# layout -> (flags, the ratio that it should stay below)
LAYOUTS: dict[str, tuple[list[str], float | None]] = {
    ONE_PROCESS: ([], None),
    "FSDP 2": (_FSDP, 1.15),
    "PP 2": (["--parallelism.pipeline_parallel_degree=2"], 1.12),
    "TP 2": (["--parallelism.tensor_parallel_degree=2"], 1.5),
    "CP 2, allgather": (_CP, 1.5),
    "CP 2, alltoall": ([*_CP, "--parallelism.context_parallel_rotate_method=alltoall"], 1.5),
    "FSDP 2, EP 2": ([*_FSDP, "--parallelism.expert_parallel_degree=2"], None),
}
# model -> (flavor, layouts)
MODELS = {
    "llama3": ("debugmodel", [name for name in LAYOUTS if "EP" not in name]),
    "qwen3": ("debugmodel_moe_small", [ONE_PROCESS, "FSDP 2", "FSDP 2, EP 2"]),
}

# Number of the system call, by machine.
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


class InstructionCounter:
    """Counts the instructions of the threads that this process has, and of those they start."""

    def __init__(self) -> None:
        self._files = []
        number = _PERF_EVENT_OPEN.get(platform.machine())
        threads = os.listdir("/proc/self/task") if number else []
        # Of struct perf_event_attr: type "hardware", size, event "instructions"; and at byte 40
        # the flags "inherited by new threads" and "without those of a hypervisor".
        attributes = bytearray(128)
        struct.pack_into("IIQ", attributes, 0, 0, len(attributes), 1)
        struct.pack_into("Q", attributes, 40, 1 << 1 | 1 << 6)
        libc = ctypes.CDLL(None)
        for thread in threads:
            buffer = ctypes.create_string_buffer(bytes(attributes), len(attributes))
            file = libc.syscall(number, buffer, int(thread), -1, -1, 0)
            if file >= 0:
                self._files.append(file)

    def read(self) -> float:
        """So far; nan if they cannot be counted."""
        if not self._files:
            return float("nan")
        return float(sum(struct.unpack("q", os.read(file, 8))[0] for file in self._files))


def costs_of_steps(model: str, layout: str) -> list[tuple[float, float]]:
    """(CPU seconds, instructions) of this process in each step, after some to warm up."""
    if layout == ONE_PROCESS:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    from torchtitan.config import ConfigManager
    from torchtitan.engine import TrainingEngine

    engine = TrainingEngine(
        ConfigManager().parse_args(
            [
                f"--model.name={model}",
                f"--model.flavor={MODELS[model][0]}",
                f"--job.dump_folder={tempfile.mkdtemp()}",
                f"--training.local_batch_size={ROWS}",
                f"--training.seq_len={SEQ_LEN}",
                "--training.mixed_precision_param=float32",
                "--activation_checkpoint.mode=none",
                "--debug.seed=0",
                *LAYOUTS[layout][0],
            ]
        )
    )
    generator = torch.Generator().manual_seed(0)
    vocab_size = engine.model_args.vocab_size
    rows = torch.randint(0, vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    rows = rows.chunk(engine.dp_size)[engine.dp_rank]
    batch, labels = {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    costs = []
    counter = InstructionCounter()
    for _ in range(WARM_UP_STEPS + STEPS):
        dist.barrier()
        started = time.process_time(), counter.read()
        engine.forward_backward_step(
            input_dict=batch, labels=labels, global_valid_tokens=ROWS * SEQ_LEN
        )
        engine.optim_step()
        dist.barrier()  # what a step leaves to gloo's threads belongs to it
        costs.append((time.process_time() - started[0], counter.read() - started[1]))
    engine.close()
    return costs[WARM_UP_STEPS:]


def best_step(model: str, layout: str) -> list[float]:
    """[CPU seconds, instructions] of all ranks together, each of its best step."""
    ranks = run_ranks(
        costs_of_steps, 2, model, layout, init_process_group=False, timeout_seconds=600
    )
    shares = 2 if layout == ONE_PROCESS else 1
    # [ranks, steps, 2]
    return (torch.tensor(ranks, dtype=torch.float64).sum(0).amin(0) / shares).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for model in args.models:
        flavor, layouts = MODELS[model]
        layouts = [name for name in layouts if name in (ONE_PROCESS, *args.layouts)]
        best = {name: [float("inf")] * 2 for name in layouts}
        for _ in range(args.rounds):
            for name in layouts:
                best[name] = [
                    min(pair) for pair in zip(best[name], best_step(model, name), strict=True)
                ]
        print(
            f"\n{model} {flavor}\n\n| layout | CPU ms per step | ratio | goal | instructions, ratio |"
            "\n|---|---:|---:|---:|---:|"
        )
        for name, costs in best.items():
            seconds, instructions = (
                cost / one for cost, one in zip(costs, best[ONE_PROCESS], strict=True)
            )
            goal = LAYOUTS[name][1] or ""
            print(
                f"| {name} | {costs[0] * 1e3:.0f} | {seconds:.2f} | {goal} | {instructions:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
