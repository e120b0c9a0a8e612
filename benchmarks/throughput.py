"""Tokens per second and MFU of compiled bf16 training on packed documents, on one GPU.

    python benchmarks/throughput.py --json out.json     # Llama 1B and Qwen 0.6B
    python benchmarks/throughput.py --models "Qwen 3.5 0.8B" --attn-types varlen

Rows have documents of 1,024 tokens on average. Wall time of whole blocks of steps is counted, and the host
waits for the device between blocks only. The MFU's FLOPs are 6 per matmul parameter, of a tied output
projection too, and 6 per layer, head, size of query and value, and token of the document; the metrics' number,
"as logged", leaves the tied projection out. Recompilations and waits are those of a last block.
`--models debugmodel` also runs on a CPU. What a step costs a CPU is measured by benchmarks/steps.py.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import GIB, matmul_rate, print_header, print_row

from tests.gpu.waits import counting_waits, num_graphs
from tests.reliability.jobs import flags_in
from torchtitan.tools.utils import get_device_info, get_device_type, get_peak_flops

# name: (family, flavor, tokens per row). Two rows fit into 80 GB: 60 GiB for 1B. For 8B, see scripts/run_cuda_build.sh.
MODELS = {
    "1B": ("llama3", "1B", 16384),
    "0.6B": ("qwen3", "0.6B", 16384),
    "Qwen 3.5 0.8B": ("qwen3_5", "0.8B", 16384),
    "8B": ("llama3", "8B", 8192),
    "debugmodel": ("llama3", "debugmodel", 512),
}
MEAN_DOCUMENT = 1024
WARM_UP_STEPS = 5


@dataclasses.dataclass
class Result:
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
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / MEAN_DOCUMENT] = eos_id
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if torch.cuda.is_available():
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        batches.append(({"input": inputs}, labels))
    return itertools.cycle(batches)


def synchronize() -> None:
    if get_device_type() != "cpu":
        torch.accelerator.synchronize()


def measure(result: Result, n_blocks: int, n_steps: int) -> None:
    """Train in `n_blocks` timed blocks of `n_steps` steps each, and write the figures into `result`."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    family, flavor, seq_len = MODELS[result.model]
    flags = flags_in(f"""
        model.name={family} model.flavor={flavor} model.attn_type={result.attn_type}
        model.attn_mask_type=block_causal training.dataset=python_docs
        training.local_batch_size={result.rows} training.seq_len={seq_len}
        training.mixed_precision_param=bfloat16 activation_checkpoint.mode=none compile.enable
        metrics.log_freq=1000000 debug.seed=0 job.dump_folder={tempfile.mkdtemp()}
    """)
    trainer = Trainer(ConfigManager().parse_args([*flags, *result.overrides]))
    try:
        _fill_in(result, trainer, n_blocks, n_steps)
    finally:
        trainer.close()


def _fill_in(result: Result, trainer, n_blocks: int, n_steps: int) -> None:
    vocab_size, eos_id = trainer.model_args.vocab_size, trainer.tokenizer.eos_id
    data = trainer.batch_generator(packed_batches(result.rows, result.seq_len, vocab_size, eos_id))
    losses = []
    forward_backward = trainer.forward_backward_step

    def keep_loss(**kwargs):
        losses.append(forward_backward(**kwargs))
        return losses[-1]

    trainer.forward_backward_step = keep_loss

    def run_block() -> tuple[float, float]:
        """Seconds until the device had done all work, and until the host had issued it."""
        synchronize()
        started = time.perf_counter()
        for _ in range(n_steps):
            trainer.step += 1
            trainer.train_step(data)
        issued = time.perf_counter()
        synchronize()
        return time.perf_counter() - started, issued - started

    started = time.perf_counter()
    for _ in range(-(-WARM_UP_STEPS // n_steps)):
        run_block()
    result.seconds_to_warm_up = time.perf_counter() - started

    graphs = num_graphs()
    trainer._attended_pairs = trainer._attending_tokens = 0
    seconds, host = statistics.median_low(run_block() for _ in range(n_blocks))
    trainer._count_flops()
    with counting_waits() as waits:
        run_block()
    result.recompilations = num_graphs() - graphs
    result.waits_per_step = {place: count / n_steps for place, count in waits.items()}
    result.host_share = host / seconds
    result.milliseconds_per_step = 1e3 * seconds / n_steps
    result.tokens_per_second = result.rows * result.seq_len * n_steps / seconds
    logged = trainer.metrics_processor.num_flops_per_token
    (model,) = trainer.model_parts
    is_tied = getattr(trainer.model_args, "enable_weight_tying", False)
    flops = logged + 6 * is_tied * model.output.weight.numel()
    result.share_of_matmul_rate = result.tokens_per_second * flops / matmul_rate()
    device_type, device_module = get_device_info()
    if device_type != "cpu":
        peak = get_peak_flops(device_module.get_device_name())
        if peak is not None:
            result.mfu = result.tokens_per_second * flops / peak
            result.mfu_as_logged = result.tokens_per_second * logged / peak
        result.peak_memory_gib = device_module.max_memory_allocated() / GIB
    result.loss = losses[-1].item()


def measure_all(args: argparse.Namespace) -> None:
    results = []
    for model, attn_type in itertools.product(args.models, args.attn_types):
        rows = args.rows
        while rows > 0:
            result = Result(model, attn_type, rows, MODELS[model][2], args.override)
            try:
                measure(result, args.blocks, args.steps)
            except Exception as error:  # the other cases have something to tell, too
                result.error = f"{type(error).__name__}: {error}".splitlines()[0]
            results.append(result)
            show(result)
            torch._dynamo.reset()
            gc.collect()
            if get_device_type() != "cpu":
                torch.accelerator.empty_cache()
                get_device_info()[1].reset_peak_memory_stats()
            if "OutOfMemory" not in result.error:
                break
            rows //= 2
        if args.json:  # after each, as a run may be cut short
            args.json.write_text(json.dumps([dataclasses.asdict(x) for x in results], indent=2))


def show(result: Result) -> None:
    name = result.model, result.attn_type, f"{result.rows} x {result.seq_len}"
    if result.error:
        print_row(*name, f"FAILED: {result.error}")
        return
    print_row(
        *name,
        f"{result.tokens_per_second:,.0f}",
        f"{result.milliseconds_per_step:.1f} ms",
        "-" if result.mfu is None else f"{result.mfu:.1%}",
        f"{result.share_of_matmul_rate:.1%}",
        f"{result.peak_memory_gib:.1f} GiB",
        f"{result.host_share:.1%}",
        result.recompilations,
        f"{sum(result.waits_per_step.values()):g}",
    )
    for place, count in sorted(result.waits_per_step.items(), key=lambda item: -item[1]):
        print(f"    waits {count:g} times per step in {place}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "0.6B"])
    parser.add_argument("--attn-types", nargs="+", default=["flex", "varlen"])
    parser.add_argument("--steps", type=int, default=5, help="of each timed block")
    parser.add_argument("--blocks", type=int, default=5, help="timed blocks")
    parser.add_argument("--rows", type=int, default=2, help="per batch; half if they do not fit")
    parser.add_argument("--override", nargs="+", default=[], help="of the config, without --")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    args.override = [f"--{override}" for override in args.override]
    torch.set_num_threads(1)
    on_gpu = get_device_type() != "cpu"
    device = get_device_info()[1].get_device_name() if on_gpu else "cpu"
    print(f"torch {torch.__version__}, {device}, bf16, compiled, packed documents")
    titles = "model", "kernel", "rows x T", "tokens/s", "per step", "MFU", "of matmuls", "memory"
    print_header(*titles, "host", "recompiled", "waits")
    measure_all(args)


if __name__ == "__main__":
    main()
