"""How the cost of a training step grows with each size, beside the law that it should follow.

    python benchmarks/growth.py [--only "sequence length" experts]

Small Qwen 3 models in fp32 on one thread; CPU-seconds, the least of several steps. The models of a
sweep are alive at the same time and take turns, so that other load on the machine meets all alike;
ranks are processes of their own. Every law is worked out from the sizes: FLOPs of matrix products,
six per weight and token, and of attention, seven times half a square of scores; for the optimizer
the number of parameters. "Measured" and "law" are exponents: the slope of log cost over log size,
of a line through all points.
"""

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.testing.gloo import run_ranks


@dataclass(frozen=True)
class Size:
    dim: int = 128
    n_layers: int = 2
    vocab_size: int = 512
    n_experts: int = 0  # 0 is a dense feed-forward
    rows: int = 4
    seq_len: int = 256
    n_documents: int = 0  # in each row; 0 is causal attention without documents
    n_microbatches: int = 1
    n_ranks: int = 1

    @property
    def n_tokens(self) -> int:
        return self.rows * self.seq_len * self.n_microbatches


# What grows -> its points. Few tokens where parameters should count, and the other way round.
SWEEPS: dict[str, list[tuple[int, Size]]] = {
    "sequence length": [(n, Size(rows=1, seq_len=n)) for n in (512, 1024, 2048, 4096)],
    "sequence length, documents of 256": [
        (n, Size(rows=1, seq_len=n, n_documents=n // 256)) for n in (512, 1024, 2048, 4096)
    ],
    "documents in a row of 4,096": [
        (n, Size(rows=1, seq_len=4096, n_documents=n)) for n in (1, 4, 16, 64, 256)
    ],
    "rows": [(n, Size(rows=n)) for n in (2, 4, 8, 16)],
    "microbatches": [(n, Size(n_microbatches=n)) for n in (1, 2, 4, 8)],
    "ranks (FSDP), the same batch": [(n, Size(rows=8, n_ranks=n)) for n in (1, 2, 4)],
    "layers": [(n, Size(n_layers=n)) for n in (2, 4, 8, 16)],
    "parameters (by width)": [(n, Size(dim=n)) for n in (128, 256, 512)],
    "vocabulary": [(n, Size(vocab_size=n, rows=2)) for n in (2048, 8192, 32768, 131072)],
    "experts": [(n, Size(n_experts=n)) for n in (4, 16, 64, 128)],
}
TOP_K, HEAD_DIM = 2, 32


def flops_and_parameters(size: Size) -> tuple[float, float]:
    """Of forward and backward of a step, and of the model."""
    hidden = 3 * size.dim
    attention = 4 * size.dim**2  # as many heads of keys as of queries
    width = hidden * TOP_K + size.n_experts / 3 if size.n_experts else hidden  # and the router
    used = size.n_layers * (attention + 3 * size.dim * width) + size.dim * size.vocab_size
    scores = size.seq_len / max(1, size.n_documents)
    flops = 6 * used + 7 * scores * size.dim * size.n_layers
    experts = max(1, size.n_experts)
    parameters = size.n_layers * (attention + 3 * size.dim * hidden * experts)
    return flops * size.n_tokens, parameters + 2 * size.dim * size.vocab_size


class Steps:
    """A model of one size; each call runs a step and returns CPU-seconds of its two halves."""

    def __init__(self, size: Size) -> None:
        from torchtitan.config import ConfigManager
        from torchtitan.engine import TrainingEngine
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

        n_heads = size.dim // HEAD_DIM
        experts = MoEArgs(num_experts=max(1, size.n_experts), num_shared_experts=0, top_k=TOP_K)
        qwen3_args["growth"] = Qwen3ModelArgs(
            dim=size.dim,
            n_layers=size.n_layers,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=HEAD_DIM,
            hidden_dim=3 * size.dim,
            vocab_size=size.vocab_size,
            moe_enabled=size.n_experts > 0,
            moe_inter_dim=3 * size.dim,
            **({"moe_args": experts} if size.n_experts else {}),
        )
        documents = ["--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]
        self.engine = TrainingEngine(
            ConfigManager().parse_args(
                [
                    "--model.name=qwen3",
                    "--model.flavor=growth",
                    f"--training.local_batch_size={size.rows // size.n_ranks}",
                    f"--training.global_batch_size={size.rows * size.n_microbatches}",
                    f"--training.seq_len={size.seq_len}",
                    "--training.mixed_precision_param=float32",
                    "--activation_checkpoint.mode=none",
                    "--debug.seed=0",
                    f"--job.dump_folder={tempfile.mkdtemp()}",
                    *(documents if size.n_documents else []),
                ]
            )
        )
        generator = torch.Generator().manual_seed(self.engine.dp_rank)
        shape = size.rows // size.n_ranks, size.seq_len
        tokens = torch.randint(0, size.vocab_size, shape, generator=generator)
        self.batch = {"input": tokens}
        if size.n_documents:
            positions = torch.arange(size.seq_len) % (size.seq_len // size.n_documents)
            self.batch["positions"] = positions.expand(shape).contiguous()
        self.size = size

    def __call__(self) -> tuple[float, float]:
        n = self.size.n_microbatches
        started = time.process_time()
        self.engine.forward_backward_step(
            input_dict=[dict(self.batch) for _ in range(n)],
            labels=[self.batch["input"]] * n,
            global_valid_tokens=self.size.n_tokens,
        )
        between = time.process_time()
        self.engine.optim_step()
        return between - started, time.process_time() - between


def least_of_rank(size: Size, n_steps: int) -> tuple[float, float]:
    step = Steps(size)
    least = _least(step() for _ in range(n_steps))
    step.engine.close()
    return least


def _least(costs: Any) -> tuple[float, float]:
    return tuple(map(min, zip(*costs, strict=True)))


def measure(points: list[tuple[int, Size]], n_steps: int) -> list[tuple[float, float]]:
    """CPU-seconds of (forward and backward, optimizer) of each point, all ranks together."""
    if points[-1][1].n_ranks > 1:
        costs = []
        for _, size in points:
            ranks = run_ranks(
                least_of_rank,
                size.n_ranks,
                size,
                n_steps,
                init_process_group=False,
                timeout_seconds=3600,
            )
            costs.append(tuple(map(sum, zip(*ranks, strict=True))))
        return costs
    models = [Steps(size) for _, size in points]
    for model in models:
        model()  # makes the optimizer's state
    turns = [[model() for model in models] for _ in range(n_steps)]
    for model in models:
        model.engine.close()
    return [_least(costs) for costs in zip(*turns, strict=True)]


def slope(sizes: list[float], costs: list[float]) -> float:
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    squares = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / squares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SWEEPS), choices=SWEEPS)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| what grows | from, to | forward and backward, ms | law | measured | optimizer, ms | law "
        "| measured |\n|" + "---|" * 8
    )
    for name in args.only:
        points = SWEEPS[name]
        sizes = [size for size, _ in points]
        costs = list(zip(*measure(points, args.steps), strict=True))
        laws = list(zip(*(flops_and_parameters(size) for _, size in points), strict=True))
        cells = [name, f"{sizes[0]:,} to {sizes[-1]:,}"]
        for law, cost in zip(laws, costs, strict=True):
            cells.append(", ".join(f"{1e3 * seconds:.3g}" for seconds in cost))
            cells += [f"{slope(sizes, values):.2f}" for values in (law, cost)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
