"""A certificate that packed documents are isolated from each other.

    python -m torchtitan.testing.isolation                 10,000 random packings
    python -m torchtitan.testing.isolation --seconds 60    for 60 seconds

Rows of documents and padding go through flex and varlen attention. The output and the gradients have
to equal those of torch's own causal attention, called on one document at a time: bitwise on the CPU,
within the rounding of bf16 on an accelerator.

They also go through linear attention with a recurrent state, on the CPU: one gated delta layer, with its
convolution. In fp64 outputs and gradients have to be those of the same layer on one document at a time.
In fp32 no bit of a document's output and gradients may change when all other documents of the batch
are replaced, also by documents of other lengths, and its gradient for their tokens has to be exactly zero.

B rows, T tokens, H query heads, K key/value heads, D head size, M model dim.
"""

import argparse
import copy
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.documents import read_document_ids
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.models.gated_delta import GatedDeltaNet

# Largest allowed absolute error. Gradients are about 10, and bf16 has 8 significant bits.
TOLERANCES = {torch.float32: 0.0, torch.bfloat16: 0.1}
# In fp64, of layers with a recurrent state; relative to the largest number.
FP64_TOLERANCE = 1e-12

# (q [B, H, T, D], k, v [B, K, T, D], document ids [B, T]) -> [B, T, H, D]
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of the output
# For each row, the (start, end) of its documents; every padding token counts as one document.
Spans = list[list[tuple[int, int]]]


def attend_by(attn_type: str, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    mask = DocumentMask.from_documents(document_ids)
    return attend(build_inner_attention(attn_type), q, k, v, mask)


KERNELS: dict[str, AttentionFunction] = {
    attn_type: partial(attend_by, attn_type) for attn_type in ("flex", "varlen")
}


def run_packed(kernel: AttentionFunction, inputs: Inputs, document_ids: Tensor) -> list[Tensor]:
    """Return the output [B, H, T, D] and the gradients of q, k and v."""
    *qkv, grad_out = inputs
    out = kernel(*qkv, document_ids).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


def run_alone(inputs: Inputs, spans: Spans) -> list[Tensor]:
    """Return the result of `run_packed`, computed by torch's causal attention, a call per document."""
    q, k, v, grad_out = (x.detach() for x in inputs)
    results = [torch.empty_like(x) for x in (q, q, k, v)]
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            *leaves, grad = (x[row : row + 1, :, start:end] for x in (q, k, v, grad_out))
            for leaf in leaves:
                leaf.requires_grad_()
            out = F.scaled_dot_product_attention(
                *leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            parts = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            if end - start == 1:  # the exact gradients of q and k are 0; torch's are not
                parts[1:3] = (torch.zeros_like(x) for x in parts[1:3])
            for result, part in zip(results, parts, strict=True):
                result[row, :, start:end] = part[0]
    return results


def random_row(rng: random.Random, seq_len: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (position of each token, spans of documents) of a random row; padding has position -1.

    Some documents begin at a position above 0, as if an earlier row held their first tokens.
    """
    positions: list[int] = []
    spans: list[tuple[int, int]] = []
    longest = rng.choice([1, 4, max(1, seq_len // 4), seq_len])
    while (start := len(positions)) < seq_len:
        end = start + rng.randint(1, min(longest, seq_len - start))
        if rng.random() < 0.1:
            positions += [-1] * (end - start)
            spans += [(i, i + 1) for i in range(start, end)]
            continue
        first = rng.choice([0, 0, rng.randint(1, 40)])
        if positions and first == positions[-1] + 1:
            first = 0  # otherwise its positions would continue the previous document
        positions += range(first, first + end - start)
        spans.append((start, end))
    return positions, spans


def check_packing(index: int, seed: int = 0, device: str = "cpu") -> tuple[list[str], int]:
    """Return (problems found in packing number `index`, number of documents in it)."""
    # Four consecutive packings share a shape, so a wrongly cached mask would be used and detected.
    shape_rng = random.Random(f"shape {seed} {index // 4}")
    n_rows, seq_len, head_dim = shape_rng.randint(1, 3), shape_rng.randint(1, 64), 16
    dtype = torch.float32
    if device != "cpu":  # one shape, because each shape compiles kernels; bf16
        n_rows, seq_len, head_dim, dtype = 2, 256, 64, torch.bfloat16
    rng = random.Random(f"packing {seed} {index}")
    rows = [random_row(rng, seq_len) for _ in range(n_rows)]
    positions = torch.tensor([row for row, _ in rows], device=device)
    spans = [row_spans for _, row_spans in rows]

    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    n_kv_heads = rng.choice([1, 2, 4])
    q, k, v, grad_out = (
        # Strides of [B, T, H, D], like the outputs of projections.
        torch.randn(n_rows, seq_len, n_heads, head_dim, generator=generator)
        .to(device, dtype)
        .transpose(1, 2)
        for n_heads in (4, n_kv_heads, n_kv_heads, 4)
    )
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out
    batch = {"input": positions, "positions": positions}
    document_ids = read_document_ids(batch, "position_block_causal", None)
    alone = run_alone(inputs, spans)
    problems = []
    for name, kernel in KERNELS.items():
        packed = run_packed(kernel, inputs, document_ids)
        errors = torch.stack([(x - y).abs().max() for x, y in zip(packed, alone, strict=True)])
        if not errors.max() <= TOLERANCES[dtype]:  # nan fails too
            listed = ", ".join(f"{error:.1e}" for error in errors)
            problems.append(f"{name}: errors of output and gradients of q, k, v: {listed}")
    if problems:
        problems += [f"row {i}: positions {row}" for i, (row, _) in enumerate(rows)]
    return problems, sum(len(row_spans) for row_spans in spans)


# ---- layers with a recurrent state ----


def run_layer(layer: nn.Module, x: Tensor, mask: DocumentMask, grad_out: Tensor) -> list[Tensor]:
    """Return the output [B, T, M], and the gradients of x and of each parameter."""
    x = x.detach().requires_grad_()
    out = layer(x, None, mask)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad_out)]


def run_layer_alone(layer: nn.Module, x: Tensor, spans: Spans, grad_out: Tensor) -> list[Tensor]:
    """Return the result of `run_layer`, computed with rows of one document."""
    results = [torch.zeros_like(t) for t in (x, x, *layer.parameters())]
    by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            by_length[end - start].append((row, start))
    for length, places in by_length.items():  # one call for all documents of a length
        rows, starts = torch.tensor(places).T.unsqueeze(-1)
        where = rows, starts + torch.arange(length)
        mask = DocumentMask.from_rows(len(places), length, x.device)
        parts = run_layer(layer, x[where], mask, grad_out[where])
        for target, part in zip(results[:2], parts[:2], strict=True):
            target[where] = part
        for target, part in zip(results[2:], parts[2:], strict=True):
            target += part
    return results


def check_recurrent_packing(layer: nn.Module, dim: int, index: int, seed: int = 0) -> list[str]:
    """Return problems found in packing number `index`.

    layer: an fp32 module, called with (x [B, T, dim], None, mask).
    """
    rng = random.Random(f"recurrent {seed} {index}")
    n_rows, seq_len = rng.randint(1, 3), rng.choice([rng.randint(1, 48), rng.randint(49, 200)])
    rows = [random_row(rng, seq_len) for _ in range(n_rows)]
    positions = torch.tensor([row for row, _ in rows])
    batch = {"input": positions, "positions": positions}
    document_ids = read_document_ids(batch, "position_block_causal", None)
    mask, spans = DocumentMask.from_documents(document_ids), [row_spans for _, row_spans in rows]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x, others, grad_out = torch.randn(3, n_rows, seq_len, dim, generator=generator)

    problems = []
    exact = copy.deepcopy(layer).double()
    packed = run_layer(exact, x.double(), mask, grad_out.double())
    alone = run_layer_alone(exact, x.double(), spans, grad_out.double())
    names = ["output", "gradient of the input", *(name for name, _ in layer.named_parameters())]
    for name, ours, theirs in zip(names, packed, alone, strict=True):
        if not (ours - theirs).abs().max() <= FP64_TOLERANCE * max(1, theirs.abs().max()):
            problems.append(
                f"{name}: differs from documents alone by {(ours - theirs).abs().max():.1e}"
            )

    # One document of each row stays, and everything around it is cut and filled in another way.
    is_start = torch.rand(x.shape[:2], generator=generator) < 0.3
    is_own = torch.zeros_like(is_start)
    for row, row_spans in enumerate(spans):
        start, end = rng.choice(row_spans)
        is_own[row, start:end] = True
        is_start[row, start:end] = False
        is_start[row, start] = True
        is_start[row, end : end + 1] = True
    other_mask = DocumentMask.from_documents(is_start.cumsum(1, dtype=torch.int32))
    own = is_own.unsqueeze(-1)
    grad_out = grad_out * own
    before = run_layer(layer, x, mask, grad_out)
    after = run_layer(layer, torch.where(own, x, others), other_mask, grad_out)
    if before[1][~is_own].any():
        problems.append("tokens of other documents have a gradient")
    before[0], after[0] = before[0] * own, after[0] * own
    for name, x_before, x_after in zip(names, before, after, strict=True):
        if not torch.equal(x_before, x_after):
            n_moved = int((x_before != x_after).sum())
            problems.append(f"{name}: other documents change {n_moved} numbers")
    if problems:
        problems += [f"row {i}: positions {row}" for i, (row, _) in enumerate(rows)]
    return problems


def small_delta_net() -> GatedDeltaNet:
    """Return a layer without special numbers, which would hide mistakes."""
    layer = GatedDeltaNet(
        dim=16, n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=6, conv_width=4, norm_eps=1e-6
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.4))
    return layer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.testing.isolation",
        description="Certify that packed documents don't see each other.",
    )
    parser.add_argument("--packings", type=int, default=10_000, help="number of packings (10,000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--seed", type=int, default=0, help="seed of the packings (0)")
    parser.add_argument(
        "--device", default="cpu", help="cpu (fp32), or an accelerator (bf16; try 200 packings)"
    )
    args = parser.parse_args(arguments)
    layer = small_delta_net()
    started, packings, documents = time.monotonic(), 0, 0
    while packings < args.packings and time.monotonic() - started < args.seconds:
        problems, n_documents = check_packing(packings, args.seed, args.device)
        if args.device == "cpu":
            problems += check_recurrent_packing(layer, layer.wo.out_features, packings, args.seed)
        if problems:
            print(f"documents are not isolated in packing {packings}:", *problems, sep="\n")
            return 1
        packings, documents = packings + 1, documents + n_documents
        if packings % 1000 == 0:
            print(f"{packings} packings, {time.monotonic() - started:.0f} s")
    kind = "bitwise" if args.device == "cpu" else "within the rounding of bf16"
    print(
        f"0 failures in {packings} packings: under {' and '.join(KERNELS)}, output and gradients of "
        f"{documents} documents (padding tokens included) are {kind} those of each document alone"
    )
    if args.device == "cpu":
        print("no bit of a document that goes through linear attention depends on other documents")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)  # the tensors are too small for more threads
    sys.exit(main())
