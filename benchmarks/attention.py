"""Attention over packed documents: flex and varlen against a dense mask and plain causal.

    python benchmarks/attention.py                  # CPU: T = 8,192 in 64 documents; about 2 minutes
    python benchmarks/attention.py --mask-share     # mask construction in a training step, T = 32k

On a CPU one thread's CPU-seconds are counted, so other load disturbs little. On a GPU (T =
16,384, documents of 1,024 on average, bf16) wall time is, with kernels compiled as inside a compiled
block, over layouts that change from step to step; recompilations and device synchronisations after
warm-up are counted. There the dense mask, whose scores are T^2 per head, is compared at T = 4,096.
Forward and backward together; the ratios are of one run. --json FILE also writes all figures there.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.waits import counting_waits, num_graphs
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention, choose_kernel_options
from torchtitan.tools.utils import get_device_type

DEVICE = get_device_type()
compiled_attend = torch.compile(attend)
KERNELS = ("flex", "varlen")


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    """The fastest of several calls after one to warm up."""
    best = float("inf")
    for i in range(repeats + 1):
        started = clock()
        function()
        if i > 0:
            best = min(best, clock() - started)
    return best


def clock() -> float:
    if DEVICE == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def uneven_lengths(seq_len: int, n_documents: int, seed: int = 0) -> list[int]:
    """Documents between random cuts: many short ones, some several times the mean."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(seq_len - 1, generator=generator)[: n_documents - 1] + 1
    bounds = [0, *cuts.sort().values.tolist(), seq_len]
    return torch.tensor(bounds).diff().tolist()


def ids_of(lengths: list[int]) -> Tensor:
    """Document ids [1, T]."""
    lengths = torch.tensor(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].int().to(DEVICE)


def random_inputs(seq_len: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype):
    """q [1, H, T, D] and k, v [1, K, T, D] as a model makes them, and a gradient [1, T, H, D]."""
    n_heads, n_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, seq_len, n, head_dim, generator=generator).to(DEVICE, dtype)
        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    )
    return *(x.transpose(1, 2).requires_grad_() for x in (q, k, v)), grad


def train(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(kernel(q, k, v), (q, k, v), grad)


def kernel_of(attn_type: str, mask) -> Callable[..., Tensor]:
    """With the tiles that compiled training has: tuning them would take a minute per shape."""
    inner = build_inner_attention(attn_type)
    if DEVICE == "cpu":
        return lambda q, k, v: attend(inner, q, k, v, mask)
    choose_kernel_options(inner)
    return lambda q, k, v: compiled_attend(inner, q, k, v, mask)


def dense_kernel(document_ids: Tensor) -> Callable[..., Tensor]:
    same = document_ids[0, :, None] == document_ids[0, None]
    allowed = same.tril()

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    return kernel


def compare_kernels(
    lengths: list[int], heads, head_dim: int, dtype: torch.dtype, with_dense: bool = True
) -> dict[str, Any]:
    """Print the time of each kernel and how many times faster flex and varlen are."""
    ids = ids_of(lengths)
    inputs = random_inputs(sum(lengths), heads, head_dim, dtype)
    mask = DocumentMask.from_documents(ids)
    kernels = {name: kernel_of(name, mask.lower(name)) for name in KERNELS}
    kernels["plain causal"] = kernel_of("sdpa", None)
    if with_dense:
        kernels["dense mask"] = dense_kernel(ids)
    seconds = {}
    for name, kernel in kernels.items():
        n = 5 if name in KERNELS or DEVICE != "cpu" else 2
        seconds[name] = best_seconds(lambda kernel=kernel: train(kernel, *inputs), n)
    for name, value in seconds.items():
        ratios = ""
        if name in KERNELS:
            ratios = "   ".join(
                f"{seconds[slow] / value:5.1f}x faster than {slow}"
                for slow in ("dense mask", "plain causal")
                if slow in seconds
            )
        print(f"{str(dtype)[6:]:9} {name:13} {1e3 * value:9.1f} ms   {ratios}", flush=True)
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    return {"seq_len": sum(lengths), "dtype": str(dtype)[6:], "milliseconds": milliseconds}


def show_cost_of_layouts(seq_len: int, heads, head_dim: int) -> None:
    """Print time against the sum of squared lengths, for layouts of the same tokens."""
    layouts = {
        f"{seq_len // 64} of 64": [64] * (seq_len // 64),
        "64 uneven": uneven_lengths(seq_len, 64),
        f"{seq_len // 512} of 512": [512] * (seq_len // 512),
        f"{seq_len // 2048} of 2048": [2048] * (seq_len // 2048),
    }
    inputs = random_inputs(seq_len, heads, head_dim, torch.float32)
    print(f"\n{'documents':12} {'sum of len^2':>12} {'varlen, fp32':>14} {'per 1e6 pairs':>14}")
    for name, lengths in layouts.items():
        mask = DocumentMask.from_documents(ids_of(lengths)).lower("varlen")
        kernel = kernel_of("varlen", mask)
        milliseconds = 1e3 * best_seconds(lambda kernel=kernel: train(kernel, *inputs), 3)
        pairs = sum(n * n for n in lengths)
        per_million = milliseconds / pairs * 1e6
        print(f"{name:12} {pairs:12,} {milliseconds:11.1f} ms {per_million:11.1f} ms", flush=True)


def show_mask_share(seq_len: int = 32768, mean_length: int = 512) -> None:
    """Print which part of the debug model's training step goes into building the mask."""
    from torchtitan.config import ConfigManager
    from torchtitan.engine import TrainingEngine

    ids = ids_of(uneven_lengths(seq_len, seq_len // mean_length))
    tokens = torch.randint(0, 2048, (1, seq_len + 1), device=DEVICE)
    batch = {"input": tokens[:, :-1], "document_ids": ids}
    for attn_type in KERNELS:
        engine = TrainingEngine(
            ConfigManager().parse_args(
                [
                    f"--model.flavor=debugmodel_{attn_type}_attn",
                    f"--training.seq_len={seq_len}",
                    "--training.local_batch_size=1",
                    "--training.mixed_precision_param=float32",
                    "--activation_checkpoint.mode=none",
                ]
            )
        )
        mask = best_seconds(
            lambda attn_type=attn_type: DocumentMask.from_documents(ids).lower(attn_type), 3
        )
        started = clock()
        engine.forward_backward_step(
            input_dict=batch, labels=tokens[:, 1:], global_valid_tokens=seq_len
        )
        engine.optim_step()
        step = clock() - started
        print(
            f"{attn_type:7} T = {seq_len:,}: mask {1e3 * mask:.1f} ms of a step of {step:.1f} s "
            f"= {100 * mask / step:.3f} %  (debug model, 6 layers, fp32, mean document {mean_length})",
            flush=True,
        )


def count_stalls_on_gpu(seq_len: int, n_documents: int, heads, head_dim: int) -> dict[str, Any]:
    """Print recompilations and synchronisations over ten layouts, after five to warm up."""
    inputs = random_inputs(seq_len, heads, head_dim, torch.bfloat16)
    layouts = [ids_of(uneven_lengths(seq_len, n_documents, seed)) for seed in range(15)]
    stalls = {}
    for attn_type in KERNELS:
        masks = [DocumentMask.from_documents(ids).lower(attn_type) for ids in layouts]
        for mask in masks[:5]:
            train(kernel_of(attn_type, mask), *inputs)
        before = num_graphs()
        with counting_waits() as waits:
            for mask in masks[5:]:
                train(kernel_of(attn_type, mask), *inputs)
        stalls[attn_type] = {"recompilations": num_graphs() - before, "waits": dict(waits)}
        print(f"{attn_type}: in 10 layouts {stalls[attn_type]}", flush=True)
    return stalls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mask-share", action="store_true", help="only that, at T = 32k")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {DEVICE}")
    measurements: list[Callable[[], dict[str, Any]]] = []
    if args.mask_share:
        show_mask_share()
    elif DEVICE == "cpu":
        lengths = uneven_lengths(8192, 64)
        for dtype in (torch.float32, torch.bfloat16):
            sizes = dict(heads=(8, 8), head_dim=64, dtype=dtype)
            measurements.append(partial(compare_kernels, lengths, **sizes))
    else:
        sizes = dict(heads=(32, 8), head_dim=128)
        whole, bf16 = uneven_lengths(16384, 16), torch.bfloat16
        measurements = [
            partial(compare_kernels, whole, **sizes, dtype=bf16, with_dense=False),
            partial(count_stalls_on_gpu, 16384, 16, **sizes),
            # Last: from a second length on, flex's kernels serve any.
            partial(compare_kernels, uneven_lengths(4096, 4), **sizes, dtype=bf16),
        ]
    figures = []
    for measure in measurements:
        figures.append(measure())
        if args.json:  # after each, as a run may be cut short
            Path(args.json).write_text(json.dumps(figures, indent=2))
    if DEVICE == "cpu" and not args.mask_share:
        show_cost_of_layouts(8192, heads=(8, 8), head_dim=64)


if __name__ == "__main__":
    main()
