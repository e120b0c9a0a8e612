"""Attention over packed documents: flex and varlen against a dense mask and plain causal.

    python benchmarks/attention.py                  # CPU: T = 8,192 in 64 documents; about 2 minutes

On a CPU one thread's CPU-seconds are counted, so other load disturbs little. On a GPU (T =
16,384, documents of 1,024 on average, bf16) wall time is, with kernels compiled as inside a compiled
block, over layouts that change from step to step; recompilations and device synchronisations after
warm-up are counted. There the dense mask, whose scores are T^2 per head, is compared at T = 4,096, and
varlen also goes through FlashAttention 3 and 4, each where its package is installed, for heads of 64 and 128.
Forward and backward together; the ratios are of one run. --json FILE also writes all figures there.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import print_header, print_row, take_turns
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn import functional as F

from tests.gpu.waits import counting_waits, num_graphs
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention, choose_kernel_options
from torchtitan.tools.utils import get_device_type

DEVICE = get_device_type()
compiled_attend = torch.compile(attend)
KERNELS = ("flex", "varlen")
Kernel = Callable[..., Tensor]


def uneven_lengths(seq_len: int, n_documents: int, seed: int = 0) -> list[int]:
    """Documents between random cuts: many short ones, some several times the mean."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(seq_len - 1, generator=generator)[: n_documents - 1] + 1
    return torch.tensor([0, *cuts.sort().values.tolist(), seq_len]).diff().tolist()


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


def train(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    out = kernel(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def kernel_of(attn_type: str, mask, is_compiled: bool = DEVICE != "cpu") -> Kernel:
    """With the tiles that compiled training has: tuning them would take a minute per shape."""
    inner = build_inner_attention(attn_type)
    if not is_compiled:
        return lambda q, k, v: attend(inner, q, k, v, mask)
    choose_kernel_options(inner)
    return lambda q, k, v: compiled_attend(inner, q, k, v, mask)


def dense_kernel(document_ids: Tensor) -> Kernel:
    allowed = (document_ids[0, :, None] == document_ids[0, None]).tril()

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=gqa)
        return out.transpose(1, 2)

    return kernel


@contextlib.contextmanager
def flash_attention(name: str) -> Iterator[None]:
    """A context in which torch's flash kernels are those of FlashAttention "FA3" or "FA4"."""
    torch_attention.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        torch_attention.restore_flash_attention_impl()


def compare_kernels(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    extra: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Print the time of each kernel, and its ratio to varlen. extra: "dense mask", "FA3", "FA4"."""
    ids = ids_of(lengths)
    inputs = random_inputs(sum(lengths), heads, head_dim, dtype)
    masks = {name: DocumentMask.from_documents(ids).lower(name) for name in KERNELS}
    kernels = {name: kernel_of(name, mask) for name, mask in masks.items()}
    expected = train(kernels["varlen"], *inputs)
    kernels |= {"plain causal": kernel_of("sdpa", None)}
    if "dense mask" in extra:
        kernels["dense mask"] = dense_kernel(ids)
    # Not compiled: the compiler traces torch's own kernel.
    kernels |= {x: kernel_of("varlen", masks["varlen"], False) for x in extra if x[:2] == "FA"}
    found: dict[str, Any] = {"milliseconds": {}, "differences": {}, "errors": {}}
    for name, kernel in kernels.items():
        try:
            with flash_attention(name) if name[:2] == "FA" else contextlib.nullcontext():
                results = train(kernel, *inputs)
                n = 5 if name in KERNELS or DEVICE != "cpu" else 2
                (seconds,) = take_turns(partial(train, kernel, *inputs), turns=n)
        except Exception as error:  # not installed, or not for this device
            found["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print_row(str(dtype)[6:], heads, head_dim, name, found["errors"][name])
            continue
        milliseconds = found["milliseconds"][name] = 1e3 * min(seconds)
        pairs = zip(results, expected, strict=True)
        difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if name != "plain causal":  # which sees other documents
            found["differences"][name] = difference
        ratio = f"{milliseconds / found['milliseconds']['varlen']:.2f}" if name != "flex" else ""
        print_row(str(dtype)[6:], heads, head_dim, name, f"{milliseconds:.2f}", ratio)
    shape = {"seq_len": sum(lengths), "heads": heads, "head_dim": head_dim}
    return shape | {"dtype": str(dtype)[6:]} | found


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
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--seq-len", type=int, help="16,384 on a GPU, 8,192 on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {DEVICE}")
    print_header("dtype", "heads", "size", "kernel", "ms", "of varlen")
    measurements: list[Callable[[], dict[str, Any]]] = []
    if DEVICE == "cpu":
        lengths, dense = uneven_lengths(args.seq_len or 8192, 64), ("dense mask",)
        for dtype in (torch.float32, torch.bfloat16):
            measurements.append(partial(compare_kernels, lengths, (8, 8), 64, dtype, dense))
    else:
        sizes, bf16, seq_len = ((32, 8), 128), torch.bfloat16, args.seq_len or 16384
        lengths, flash = uneven_lengths(seq_len, 16), ("FA3", "FA4")
        measurements = [
            partial(compare_kernels, lengths, *sizes, bf16, flash),
            partial(compare_kernels, lengths, (32, 8), 64, bf16, flash),
            partial(count_stalls_on_gpu, seq_len, 16, *sizes),
            # Last: from a second length on, flex's kernels serve any.
            partial(compare_kernels, uneven_lengths(4096, 4), *sizes, bf16, ("dense mask",)),
        ]
    figures = []
    for measure in measurements:
        figures.append(measure())
        if args.json:  # after each, as a run may be cut short
            Path(args.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
