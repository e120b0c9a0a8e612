"""Tokens per CPU-second of training, as a share of this machine's measured matmul rate.

    python benchmarks/throughput.py                 # debug model, fp32 and bf16, eager
    python benchmarks/throughput.py --compile --models debugmodel 50M
    python benchmarks/throughput.py --ranks 2       # FSDP and DDP against one process

Every process computes on one thread and its CPU time is counted, so other load on the machine
disturbs little; on a GPU wall time is counted instead. Matmul rate, model and overhead are
measured in the same run; the share is (FLOPs per token x tokens per second) / matmul rate.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.tools.utils import get_device_type

MODELS = {
    # name: (dim, layers, heads, kv heads, vocabulary), batch x sequence length
    "debugmodel": (None, (4, 512)),
    "50M": ((512, 12, 8, 4, 8192), (2, 512)),
}


def clock() -> float:
    """Seconds used so far: CPU seconds of this process, or wall seconds on a GPU."""
    if get_device_type() == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def matmul_rate(dtype: torch.dtype, size: tuple[int, int, int] = (2048, 384, 1024)) -> float:
    """FLOP/s of the best of several matmuls of a training step's shape."""
    m, k, n = size if get_device_type() == "cpu" else (8192, 8192, 8192)
    a = torch.randn(m, k, dtype=dtype, device=get_device_type())
    b = torch.randn(k, n, dtype=dtype, device=get_device_type())
    best = float("inf")
    for _ in range(8):
        started = clock()
        for _ in range(4):
            a @ b
        best = min(best, (clock() - started) / 4)
    return 2 * m * k * n / best


def register_model(name: str) -> str:
    """Make sure the flavor exists; returns its name."""
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    sizes, _ = MODELS[name]
    if sizes is not None and name not in llama3_args:
        dim, n_layers, n_heads, n_kv_heads, vocab_size = sizes
        llama3_args[name] = TransformerModelArgs(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            vocab_size=vocab_size,
            rope_theta=500000,
        )
    return name


def build_trainer(model: str, dtype: str, compile_model: bool, extra: list[str]):
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    batch, seq_len = MODELS[model][1]
    config = ConfigManager().parse_args(
        [
            f"--model.flavor={register_model(model)}",
            "--training.dataset=python_docs",
            f"--training.local_batch_size={batch}",
            f"--training.seq_len={seq_len}",
            f"--training.mixed_precision_param={dtype}",
            "--activation_checkpoint.mode=none",
            "--metrics.log_freq=1",
            "--debug.seed=0",
            f"--job.dump_folder={tempfile.mkdtemp()}",
            *(["--compile.enable"] if compile_model else []),
            *extra,
        ]
    )
    return Trainer(config)


@contextlib.contextmanager
def timed(owner, attribute: str, seconds: dict[str, float], key: str):
    """Add the time spent in `owner.attribute` to `seconds[key]` while inside."""
    function = getattr(owner, attribute)

    def wrapper(*args, **kwargs):
        started = clock()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[key] = seconds.get(key, 0.0) + clock() - started

    setattr(owner, attribute, wrapper)
    try:
        yield
    finally:
        setattr(owner, attribute, function)


@dataclasses.dataclass
class Result:
    model: str
    dtype: str
    compiled: bool
    layout: str
    tokens_per_second: float
    share_of_matmul_rate: float
    share_outside: float


def measure(
    model: str, dtype: str, compile_model: bool, layout: str, steps: int, extra=()
) -> Result:
    trainer = build_trainer(model, dtype, compile_model, list(extra))
    data = trainer.batch_generator(trainer.dataloader)
    for _ in range(2):  # compile, connect, allocate
        trainer.step += 1
        trainer.train_step(data)
    seconds: dict[str, float] = {}
    best, outside = float("inf"), 0.0
    with (
        timed(trainer, "forward_backward_step", seconds, "model and loss"),
        timed(trainer, "optim_step", seconds, "optimizer"),
    ):
        for _ in range(steps):
            seconds.clear()
            trainer.step += 1
            started = clock()
            trainer.train_step(data)
            total = clock() - started
            if total < best:
                best, outside = total, 1 - sum(seconds.values()) / total
    batch, seq_len = MODELS[model][1]
    rate = matmul_rate(torch.float32 if dtype == "float32" else torch.bfloat16)
    tokens_per_second = batch * seq_len / best
    trainer.close()
    return Result(
        model,
        dtype,
        compile_model,
        layout,
        tokens_per_second,
        tokens_per_second * trainer.num_flops_per_token / rate,
        outside,
    )


def measure_on_rank(model: str, layout: str, steps: int, extra: list[str]) -> dict:
    torch.set_num_threads(1)
    return dataclasses.asdict(measure(model, "float32", False, layout, steps, extra))


def measure_layouts(model: str, ranks: int, steps: int) -> list[Result]:
    """The same work per rank on one process, FSDP and DDP: slowest rank of each."""
    from torchtitan.testing.gloo import run_ranks

    cases = [
        ("1 process", 1, []),
        (f"FSDP {ranks}", ranks, [f"--parallelism.data_parallel_shard_degree={ranks}"]),
        (
            f"DDP {ranks}",
            ranks,
            [
                f"--parallelism.data_parallel_replicate_degree={ranks}",
                "--parallelism.data_parallel_shard_degree=1",
            ],
        ),
    ]
    results = []
    for layout, world_size, extra in cases:
        records = run_ranks(
            measure_on_rank,
            world_size,
            model,
            layout,
            steps,
            extra,
            init_process_group=False,
            timeout_seconds=600,
        )
        slowest = min(records, key=lambda record: record["tokens_per_second"])
        results.append(Result(**slowest))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["debugmodel", "50M"], choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="also measure compiled")
    parser.add_argument("--ranks", type=int, default=1, help="compare layouts on this many ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)

    results: list[Result] = []
    print(f"torch {torch.__version__}, {get_device_type()}, one thread")
    print("model       dtype     compiled  layout      tokens/s  % of matmul rate  % outside")
    if args.ranks > 1:
        results = measure_layouts(args.models[0], args.ranks, args.steps)
    for model in args.models if args.ranks == 1 else []:
        for dtype in args.dtypes:
            for compiled in [False, True] if args.compile else [False]:
                results.append(measure(model, dtype, compiled, "1 process", args.steps))
                show(results[-1])
    if args.ranks > 1:
        for result in results:
            show(result)
            ratio = results[0].tokens_per_second / result.tokens_per_second
            print(f"    seconds per token, ratio to one process: {ratio:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=2))


def show(result: Result) -> None:
    print(
        f"{result.model:10}  {result.dtype:8}  {'yes' if result.compiled else 'no':8}  "
        f"{result.layout:10}  {result.tokens_per_second:8,.0f}  "
        f"{100 * result.share_of_matmul_rate:16.1f}  {100 * result.share_outside:9.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
