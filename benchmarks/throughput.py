"""Tokens per second of training, as a share of what this machine's matmuls reach.

    python benchmarks/throughput.py                 # CPU: debug model, fp32 and bf16, eager
    python benchmarks/throughput.py --compile --models debugmodel 50M
    python benchmarks/throughput.py --ranks 2       # CPU: FSDP and DDP against one process
    python benchmarks/throughput.py --json out.json # GPU: Llama 1B and Qwen 0.6B, compiled, bf16

On a CPU every process computes on one thread and its CPU time is counted, so other load on the
machine disturbs little. Matmul rate, model and overhead are measured in the same run; the share
is (FLOPs per token x tokens per second) / matmul rate.

On a GPU the steps train on rows of packed documents, 1,024 tokens each on average. Wall time of
whole blocks of steps is counted, and the host waits for the device between blocks alone. The
MFU's FLOPs are 6 per matmul parameter, of a tied output projection too, and 6 per layer, head,
size of query and value, and token of the document; the metrics' number, "as logged", leaves the
tied projection out. Recompilations and waits are those of a last block.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.gpu.waits import counting_waits, num_graphs
from torchtitan.tools.utils import get_device_info, get_device_type, get_peak_flops

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


# ---- packed rows, on a GPU ----

# name: (family, flavor, tokens per row). Two rows fit into 80 GB: 60 GiB for 1B. For 8B, see scripts/run_cuda_build.sh.
PACKED_MODELS = {
    "1B": ("llama3", "1B", 16384),
    "0.6B": ("qwen3", "0.6B", 16384),
    "8B": ("llama3", "8B", 8192),
    "debugmodel": ("llama3", "debugmodel", 512),
}
MEAN_DOCUMENT = 1024
WARM_UP_STEPS = 5


@dataclasses.dataclass
class PackedResult:
    """tokens_per_second: of the median block. waits_per_step: by place, in steps not logged.

    mfu: share of the device's peak, None where that is not known. host_share: how long the host
    took to issue a block's work, as a share of the block; near 1, the device may have waited.
    """

    model: str
    attn_type: str
    rows: int
    seq_len: int
    overrides: list[str]
    tokens_per_second: float = 0.0
    milliseconds_per_step: float = 0.0
    mfu: float | None = None
    mfu_as_logged: float | None = None
    share_of_matmul_rate: float = 0.0
    host_share: float = 0.0
    seconds_to_warm_up: float = 0.0
    recompilations: int = 0
    waits_per_step: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_memory_gib: float = 0.0
    loss: float = 0.0
    error: str = ""


def packed_batches(rows: int, seq_len: int, vocab_size: int, eos_id: int) -> Iterator:
    """Endless (batch, labels) of random documents, each ended by the end-of-text token.

    Eight batches take turns, each with other lengths, so that making them costs nothing later.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(8):
        tokens = torch.randint(0, vocab_size - 1, (rows, seq_len + 1), generator=generator)
        tokens += tokens >= eos_id  # any token but that one
        is_end = torch.rand(tokens.shape, generator=generator) < 1 / MEAN_DOCUMENT
        tokens[is_end] = eos_id
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if torch.cuda.is_available():
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        batches.append(({"input": inputs}, labels))
    return itertools.cycle(batches)


def synchronize() -> None:
    if get_device_type() != "cpu":
        torch.accelerator.synchronize()


def measure_packed(
    model: str, attn_type: str, rows: int, n_blocks: int, n_steps: int, overrides: list[str]
) -> PackedResult:
    """Compiled training in bf16: `n_blocks` timed blocks of `n_steps` steps each."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    family, flavor, seq_len = PACKED_MODELS[model]
    result = PackedResult(model, attn_type, rows, seq_len, overrides)
    config = ConfigManager().parse_args(
        [
            f"--model.name={family}",
            f"--model.flavor={flavor}",
            f"--model.attn_type={attn_type}",
            "--model.attn_mask_type=block_causal",
            "--training.dataset=python_docs",
            f"--training.local_batch_size={rows}",
            f"--training.seq_len={seq_len}",
            "--training.mixed_precision_param=bfloat16",
            "--activation_checkpoint.mode=none",
            "--compile.enable",
            "--metrics.log_freq=1000000",
            "--debug.seed=0",
            f"--job.dump_folder={tempfile.mkdtemp()}",
            *overrides,
        ]
    )
    trainer = Trainer(config)
    try:
        _fill_in(result, trainer, n_blocks, n_steps)
    finally:
        trainer.close()
    return result


def _fill_in(result: PackedResult, trainer, n_blocks: int, n_steps: int) -> None:
    batches = packed_batches(
        result.rows, result.seq_len, trainer.model_args.vocab_size, trainer.tokenizer.eos_id
    )
    data = trainer.batch_generator(batches)
    losses = []
    forward_backward = trainer.forward_backward_step

    def keep_loss(**kwargs):
        losses.append(forward_backward(**kwargs))
        return losses[-1]

    trainer.forward_backward_step = keep_loss

    def run_block() -> tuple[float, float]:
        """Seconds until the host had issued all work, and until the device had done it."""
        synchronize()
        started = time.perf_counter()
        for _ in range(n_steps):
            trainer.step += 1
            trainer.train_step(data)
        issued = time.perf_counter()
        synchronize()
        return issued - started, time.perf_counter() - started

    started = time.perf_counter()
    for _ in range(-(-WARM_UP_STEPS // n_steps)):
        run_block()
    result.seconds_to_warm_up = time.perf_counter() - started

    graphs = num_graphs()
    trainer._attended_pairs = trainer._attending_tokens = 0
    blocks = [run_block() for _ in range(n_blocks)]
    trainer._count_flops()
    with counting_waits() as waits:
        run_block()
    result.recompilations = num_graphs() - graphs
    result.waits_per_step = {place: count / n_steps for place, count in waits.items()}

    seconds, host = statistics.median_low((total, issued) for issued, total in blocks)
    result.host_share = host / seconds
    result.milliseconds_per_step = 1e3 * seconds / n_steps
    result.tokens_per_second = result.rows * result.seq_len * n_steps / seconds
    logged = trainer.metrics_processor.num_flops_per_token
    flops = logged + 6 * _tied_parameters(trainer)
    device_type, device_module = get_device_info()
    dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
    result.share_of_matmul_rate = result.tokens_per_second * flops / matmul_rate(dtype)
    if device_type != "cpu":
        peak = get_peak_flops(device_module.get_device_name())
        if peak is not None:
            result.mfu = result.tokens_per_second * flops / peak
            result.mfu_as_logged = result.tokens_per_second * logged / peak
        result.peak_memory_gib = device_module.max_memory_allocated() / 2**30
    result.loss = losses[-1].item()


def _tied_parameters(trainer) -> int:
    (model,) = trainer.model_parts
    return model.output.weight.numel() if trainer.model_args.enable_weight_tying else 0


def measure_all_packed(args: argparse.Namespace) -> list[PackedResult]:
    results = []
    for model, attn_type in itertools.product(args.models, args.attn_types):
        rows = args.rows or 2
        while rows > 0:
            try:
                result = measure_packed(
                    model, attn_type, rows, args.blocks, args.steps, args.override
                )
            except Exception as error:  # the other cases have something to tell, too
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                seq_len = PACKED_MODELS[model][2]
                result = PackedResult(model, attn_type, rows, seq_len, args.override, error=message)
                del error
            results.append(result)
            show_packed(result)
            _free_memory()
            if "OutOfMemory" not in result.error:
                break
            rows //= 2
        if args.json:  # after each, as a run may be cut short
            write_json(args.json, results)
    return results


def _free_memory() -> None:
    import gc

    torch._dynamo.reset()
    gc.collect()
    if get_device_type() != "cpu":
        torch.accelerator.empty_cache()
        get_device_info()[1].reset_peak_memory_stats()


def show_packed(result: PackedResult) -> None:
    name = f"{result.model:10}  {result.attn_type:6}  {result.rows:4} x {result.seq_len:<6}"
    if result.error:
        print(f"{name}  FAILED: {result.error}", flush=True)
        return
    mfu = "-" if result.mfu is None else f"{100 * result.mfu:.1f} %"
    print(
        f"{name}  {result.tokens_per_second:9,.0f}  {result.milliseconds_per_step:8.1f} ms  {mfu:>7}"
        f"  {100 * result.share_of_matmul_rate:9.1f} %  {result.peak_memory_gib:6.1f} GiB"
        f"  {100 * result.host_share:5.1f} %  {result.recompilations:9}"
        f"  {sum(result.waits_per_step.values()):5.1f}",
        flush=True,
    )
    for place, count in sorted(result.waits_per_step.items(), key=lambda item: -item[1]):
        print(f"    waits {count:g} times per step in {place}", flush=True)


def write_json(path: str, results: list) -> None:
    Path(path).write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=2))


# ---- layouts, on CPU ranks ----


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
    on_gpu = get_device_type() != "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packed", action="store_true", default=on_gpu, help="as on a GPU")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *PACKED_MODELS])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="CPU: also measure compiled")
    parser.add_argument("--ranks", type=int, default=1, help="compare layouts on this many ranks")
    parser.add_argument("--steps", type=int, default=5, help="of each timed block")
    parser.add_argument("--blocks", type=int, default=5, help="GPU: timed blocks")
    parser.add_argument("--rows", type=int, help="GPU: rows per batch; 2, or 1 if they do not fit")
    parser.add_argument("--attn-types", nargs="+", default=["flex", "varlen"], help="GPU")
    parser.add_argument("--override", nargs="+", default=[], help="GPU: of the config, without --")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    args.override = [f"--{override}" for override in args.override]
    torch.set_num_threads(1)

    if args.packed and args.ranks == 1:
        args.models = args.models or ["1B", "0.6B"]
        if unknown := set(args.models) - set(PACKED_MODELS):
            parser.error(f"{', '.join(unknown)} is for the CPU; choose from {[*PACKED_MODELS]}")
        device = get_device_info()[1].get_device_name() if on_gpu else "cpu"
        print(f"torch {torch.__version__}, {device}, bf16, compiled, packed documents")
        print(
            "model       kernel  rows x T       tokens/s    per step      MFU  of matmuls"
            "  memory    host  recompiled  waits"
        )
        measure_all_packed(args)
        return
    results: list[Result] = []
    models = args.models or ["debugmodel", "50M"]
    print(f"torch {torch.__version__}, {get_device_type()}, one thread")
    print("model       dtype     compiled  layout      tokens/s  % of matmul rate  % outside")
    if args.ranks > 1:
        results = measure_layouts(models[0], args.ranks, args.steps)
    for model in models if args.ranks == 1 else []:
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
        write_json(args.json, results)


def show(result: Result) -> None:
    print(
        f"{result.model:10}  {result.dtype:8}  {'yes' if result.compiled else 'no':8}  "
        f"{result.layout:10}  {result.tokens_per_second:8,.0f}  "
        f"{100 * result.share_of_matmul_rate:16.1f}  {100 * result.share_outside:9.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
