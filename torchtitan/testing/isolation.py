"""A certificate that packed documents are isolated from each other, and see their ancestors in trees.

    python -m torchtitan.testing.isolation                 10,000 random packings
    python -m torchtitan.testing.isolation --seconds 60    for 60 seconds
    python -m torchtitan.testing.isolation --models        whole small models of Qwen 3.5 and Qwen3-Next

Rows of documents and padding go through flex and varlen attention. The output and the gradients have
to equal those of torch's own causal attention, called on one document at a time: bitwise on the CPU,
within the rounding of bf16 on an accelerator. Rows of trees are compared with torch's attention on one branch
at a time, within `TREE_TOLERANCES`, because the gradients of shared keys are sums.

On the CPU, rows also go through one gated delta layer: a convolution, and linear attention with a recurrent
state. In fp64, outputs and gradients must equal those of the same layer on one document at a time. In fp32,
no bit of a document's output and gradients may change when all other documents of the batch are replaced,
also by documents of other lengths. The output's gradient with respect to other documents must be exactly 0.
With --models, the layer is a whole model, from hidden states to logits: a linear and a full attention layer.

B rows, T tokens, H query heads, K key/value heads, D head size, M model dim.
"""

import argparse
import copy
import dataclasses
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.documents import PADDING, branch_depths, read_document_ids
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.models.gated_delta import GatedDeltaNet
from torchtitan.protocols.train_spec import get_train_spec

# Largest allowed absolute error. Gradients are about 10, and bf16 has 8 significant bits.
TOLERANCES = {torch.float32: 0.0, torch.bfloat16: 0.1}
# Largest allowed error for trees, relative to the largest number in output and gradients.
TREE_TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 0.02}
# Largest allowed errors of recurrent layers in fp64, relative to the largest number. Norms of small numbers
# are ill-conditioned: changing the last bit of an input has changed a gradient by 2e-12.
FP64_TOLERANCE, FP64_TOLERANCE_OF_GRADIENTS = 1e-12, 1e-10

# (q [B, H, T, D], k, v [B, K, T, D], document ids [B, T], for trees also depths [B, T]) -> [B, T, H, D]
AttentionFunction = Callable[..., Tensor]
# q, k, v and the gradient of the output.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
# For each row, the (start, end) of its documents; every padding token counts as one document.
Spans = list[list[tuple[int, int]]]
# For each document of trees: (row, columns from the root to the document's end, number of ancestors' columns).
Branches = list[tuple[int, list[int], int]]


def attend_by(
    attn_type: str, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, depths: Tensor | None = None
) -> Tensor:
    mask = DocumentMask.from_documents(ids, depths=depths)
    return attend(build_inner_attention(attn_type), q, k, v, mask)


def attend_by_block_mask(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, depths: Tensor | None = None
) -> Tensor:
    """Compute flex attention with a BlockMask, as on an accelerator."""
    mask = DocumentMask.from_documents(ids, depths=depths).block_mask(block_size=4)
    return attend(build_inner_attention("flex"), q, k, v, mask)


KERNELS: dict[str, AttentionFunction] = {
    attn_type: partial(attend_by, attn_type) for attn_type in ("flex", "varlen")
}
TREE_KERNELS = KERNELS | {
    "sdpa": partial(attend_by, "sdpa"),
    "flex's block mask": attend_by_block_mask,
}


def run_packed(kernel: AttentionFunction, inputs: Inputs, *documents: Tensor) -> list[Tensor]:
    """Return the output [B, H, T, D] and the gradients of q, k and v."""
    *qkv, grad_out = inputs
    out = kernel(*qkv, *documents).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


def run_alone(inputs: Inputs, spans: Spans) -> list[Tensor]:
    """Return the result of `run_packed`, computed by one call of torch's causal attention per document."""
    pairs = [(row, span) for row, row_spans in enumerate(spans) for span in row_spans]
    return run_branches_alone(inputs, [(row, list(range(*span)), 0) for row, span in pairs])


def run_branches_alone(inputs: Inputs, branches: Branches) -> list[Tensor]:
    """As `run_alone`, with one call per branch: the tokens from the root to the document's end."""
    q, k, v, grad_out = (x.detach() for x in inputs)
    results = [torch.zeros_like(x) for x in (q, q, k, v)]
    for row, columns, n_before in branches:
        *leaves, grad = (x[row : row + 1, :, columns] for x in (q, k, v, grad_out))
        for leaf in leaves:
            leaf.requires_grad_()
        out = F.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        grad[:, :, :n_before] = 0
        parts = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        if len(columns) == 1:  # the exact gradients of q and k are 0; torch's are not
            parts[1:3] = (torch.zeros_like(x) for x in parts[1:3])
        results[0][row, :, columns[n_before:]] = parts[0][0, :, n_before:]
        for result, part in zip(results[1:], parts[1:], strict=True):
            result[row, :, columns] += part[0]
    return results


def problems_of(
    kernels: dict[str, AttentionFunction],
    inputs: Inputs,
    documents: list[Tensor],
    alone: list[Tensor],
    tolerance: float,
) -> list[str]:
    """Return a message per kernel whose results differ from `alone`: documents or branches computed alone."""
    problems = []
    for name, kernel in kernels.items():
        packed = run_packed(kernel, inputs, *documents)
        errors = torch.stack([(x - y).abs().max() for x, y in zip(packed, alone, strict=True)])
        # Not `>`, so that nan fails too.
        if not errors.max() <= tolerance:
            listed = ", ".join(f"{error:.1e}" for error in errors)
            problems.append(f"{name}: errors of output and gradients of q, k, v: {listed}")
    return problems


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
            # A document that starts at `first` would look like a continuation of the previous document.
            first = 0
        positions += range(first, first + end - start)
        spans.append((start, end))
    return positions, spans


def random_tree_row(
    rng: random.Random, row: int, seq_len: int
) -> tuple[list[int], list[int], Branches]:
    """Return a random row of trees and padding: (tokens' document ids, ids of parent documents, branches)."""
    ids: list[int] = []
    parents: list[int] = []
    branches: Branches = []
    # The last document and its ancestors.
    open_documents: list[int] = []
    longest = rng.choice([1, 4, max(1, seq_len // 4)])
    labels = rng.sample(range(seq_len), seq_len)
    while (start := len(ids)) < seq_len:
        own = list(range(start, start + rng.randint(1, min(longest, seq_len - start))))
        if rng.random() < 0.05:
            ids += [PADDING] * len(own)
            parents += [PADDING] * len(own)
            branches += [(row, [column], 0) for column in own]
            open_documents = []
            continue
        open_documents = open_documents[: rng.randint(0, len(open_documents))]
        parent = branches[open_documents[-1]] if open_documents else None
        before = parent[1] if parent else []
        ids += [labels[start]] * len(own)
        parents += [ids[before[-1]] if before else PADDING] * len(own)
        open_documents.append(len(branches))
        branches.append((row, before + own, len(before)))
    return ids, parents, branches


def _random_inputs(
    rng: random.Random, n_rows: int, seq_len: int, head_dim: int, device: str, dtype: torch.dtype
) -> Inputs:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    n_kv_heads = rng.choice([1, 2, 4])
    q, k, v, grad_out = (
        # Strides of [B, T, H, D], like the outputs of projections.
        torch.randn(n_rows, seq_len, n_heads, head_dim, generator=generator)
        .to(device, dtype)
        .transpose(1, 2)
        for n_heads in (4, n_kv_heads, n_kv_heads, 4)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out


def _shape(index: int, seed: int, device: str) -> tuple[int, int, int]:
    """Return (rows, tokens per row, head size) of packing number `index`."""
    if device != "cpu":  # one shape, because each shape compiles kernels
        return 2, 256, 64
    # Four consecutive packings share a shape, so a wrongly cached mask would be used and detected.
    rng = random.Random(f"shape {seed} {index // 4}")
    return rng.randint(1, 3), rng.randint(1, 64), 16


def check_trees(index: int, seed: int = 0, device: str = "cpu") -> tuple[list[str], int]:
    """Return (problems found in rows of trees number `index`, number of branches in them)."""
    shape = n_rows, seq_len, _ = _shape(index, seed, device)
    rng = random.Random(f"trees {seed} {index}")
    dtype = torch.bfloat16 if device != "cpu" else (torch.float32, torch.float64)[index % 2]
    rows = [random_tree_row(rng, row, seq_len) for row in range(n_rows)]
    ids, parents = (torch.tensor([row[i] for row in rows]) for i in range(2))
    branches = [branch for *_, of_row in rows for branch in of_row]
    inputs = _random_inputs(rng, *shape, device, dtype)
    depths = branch_depths(ids, parents)
    documents = [x.to(device) for x in (ids, depths) if x is not None]
    alone = run_branches_alone(inputs, branches)
    tolerance = TREE_TOLERANCES[dtype] * max(1.0, *(float(x.abs().max()) for x in alone))
    problems = problems_of(TREE_KERNELS, inputs, documents, alone, tolerance)
    if problems:
        problems += [f"row {i}: ids {row[0]}, parents {row[1]}" for i, row in enumerate(rows)]
    return problems, len(branches)


def check_packing(index: int, seed: int = 0, device: str = "cpu") -> tuple[list[str], int]:
    """Return (problems found in packing number `index`, number of documents in it)."""
    shape = n_rows, seq_len, _ = _shape(index, seed, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rng = random.Random(f"packing {seed} {index}")
    rows = [random_row(rng, seq_len) for _ in range(n_rows)]
    positions = torch.tensor([row for row, _ in rows], device=device)
    spans = [row_spans for _, row_spans in rows]
    inputs = _random_inputs(rng, *shape, device, dtype)
    batch = {"input": positions, "positions": positions}
    document_ids = read_document_ids(batch, "position_block_causal", None)
    alone = run_alone(inputs, spans)
    problems = problems_of(KERNELS, inputs, [document_ids], alone, TOLERANCES[dtype])
    if problems:
        problems += [f"row {i}: positions {row}" for i, (row, _) in enumerate(rows)]
    return problems, sum(map(len, spans))


# ---- layers with a recurrent state ----


def run_layer(layer: nn.Module, x: Tensor, mask: DocumentMask, grad_out: Tensor) -> list[Tensor]:
    """Return the output [B, T, M], and the gradients of x and of each parameter."""
    x = x.detach().requires_grad_()
    out = layer(x, None, mask)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad_out)]


def run_layer_alone(layer: nn.Module, x: Tensor, spans: Spans, grad_out: Tensor) -> list[Tensor]:
    """Return the result of `run_layer`, computed with rows of one document.

    Documents of about the same length share a call. Shorter documents are padded at the end with tokens that
    earlier tokens do not see; the gradient of the padding's output is 0.
    """
    results = [torch.zeros_like(t) for t in (x, x, *layer.parameters())]
    by_size: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            by_size[(end - start).bit_length() // 2].append((row, start, end))
    for places in by_size.values():
        rows, starts, ends = torch.tensor(places).T.unsqueeze(-1)
        columns = starts + torch.arange(int((ends - starts).max()))
        is_own = columns < ends
        where = rows, columns.clamp(max=x.shape[1] - 1)
        mask = DocumentMask.from_rows(*columns.shape, x.device)
        parts = run_layer(layer, x[where], mask, grad_out[where] * is_own.unsqueeze(-1))
        own = rows.expand_as(columns)[is_own], columns[is_own]
        for target, part in zip(results[:2], parts[:2], strict=True):
            target[own] = part[is_own]
        for target, part in zip(results[2:], parts[2:], strict=True):
            target += part
    return results


def check_recurrent_packing(
    layer: nn.Module, dim: int, index: int, seed: int = 0
) -> tuple[list[str], int]:
    """Return (problems found in packing number `index`, number of documents in it).

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
    # Keep routers in fp64: they call `float` to convert to fp32.
    with mock.patch.object(Tensor, "float", Tensor.double):
        packed = run_layer(exact, x.double(), mask, grad_out.double())
        alone = run_layer_alone(exact, x.double(), spans, grad_out.double())
    names = ["output", "gradient of the input", *(name for name, _ in layer.named_parameters())]
    for name, ours, theirs in zip(names, packed, alone, strict=True):
        tolerance = FP64_TOLERANCE if name == "output" else FP64_TOLERANCE_OF_GRADIENTS
        if not (ours - theirs).abs().max() <= tolerance * max(1, theirs.abs().max()):
            problems.append(
                f"{name}: differs from documents alone by {(ours - theirs).abs().max():.1e}"
            )

    # Keep one document of each row, and replace all tokens and document boundaries around it.
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
    return problems, sum(map(len, spans))


def small_delta_net() -> GatedDeltaNet:
    """Return a layer with random weights; special values such as 0 or 1 would hide mistakes."""
    layer = GatedDeltaNet(
        dim=16, n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=6, conv_width=4, norm_eps=1e-6
    )
    return _randomize(layer)


class WholeModel(nn.Module):
    """A decoder without embedding, called as a layer: hidden states [B, T, M] -> logits of the same shape.

    In fp32 a token's position in the batch, not the router, chooses its experts, because rounding in an
    expert depends on how many tokens the expert gets.
    """

    def __init__(self, flavor: str, **fields: Any):
        super().__init__()
        spec = get_train_spec("qwen3_5")
        sizes = dict(
            dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, vocab_size=16,
            linear_key_heads=2, linear_value_heads=4, linear_key_dim=8, linear_value_dim=6,
            layer_types=("linear_attention", "full_attention"), max_seq_len=256,
            attn_type="varlen", attn_mask_type="position_block_causal",
        )  # fmt: skip
        args = dataclasses.replace(spec.model_args[flavor], **sizes | fields)
        # torch's grouped matmul refuses fp64.
        experts = dataclasses.replace(args.moe_args, use_grouped_mm=False)
        self.model = spec.model_cls(dataclasses.replace(args, moe_args=experts))
        self.model.tok_embeddings = None
        _randomize(self.model)
        for name, buffer in self.model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.zero_()

    def forward(self, x: Tensor, rope: None, mask: DocumentMask) -> Tensor:
        n_rows, length = x.shape[:2]
        positions = torch.arange(length) - mask.starts_of_rows(n_rows, length, x.device)
        experts = None
        if x.dtype == torch.float32 and (layers := self.model.moe_layers):
            args = self.model.model_args.moe_args
            generator = torch.Generator().manual_seed(0)
            shape = n_rows, length, len(layers), args.num_experts
            experts = torch.rand(shape, generator=generator).topk(args.top_k).indices
        return self.model(x, mask, positions, routed_experts=experts)


MODELS: dict[str, Callable[[], WholeModel]] = {
    "qwen3_5": partial(WholeModel, "debugmodel"),
    "qwen3_5_moe": partial(WholeModel, "debugmodel_moe", moe_inter_dim=8),
    "qwen3_next": partial(
        WholeModel, "debugmodel_moe", moe_inter_dim=8, hf_type="qwen3_next", linear_value_heads=6
    ),
}


def _randomize(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.4))
    return module


def certify(checks: dict[str, Callable[[int], tuple[list[str], int]]], args: Any) -> Counter[str]:
    """Return name -> number of documents that the check has seen, and "packings" -> number of packings.

    checks: name -> function of the packing's index, which returns (problems, number of documents). If there
        is a problem, the process exits with code 1.
    """
    started, counts = time.monotonic(), Counter(packings=0)
    while counts["packings"] < args.packings and time.monotonic() - started < args.seconds:
        for name, check in checks.items():
            problems, n_documents = check(counts["packings"])
            if problems:
                print(
                    f"documents are not isolated in {name} {counts['packings']}:",
                    *problems,
                    sep="\n",
                )
                sys.exit(1)
            counts[name] += n_documents
        counts["packings"] += 1
        if counts["packings"] % 1000 == 0:
            print(f"{counts['packings']} packings, {time.monotonic() - started:.0f} s")
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.testing.isolation",
        description="Certify that packed documents don't see each other.",
    )
    add = parser.add_argument
    add("--packings", type=int, default=10_000, help="number of packings (10,000)")
    add("--seconds", type=float, default=float("inf"), help="stop after this long")
    add("--seed", type=int, default=0, help="seed of the packings (0)")
    add("--device", default="cpu", help="cpu (fp32), or an accelerator (bf16; try 200 packings)")
    add("--models", nargs="*", choices=MODELS, help="check these models, on the CPU, in place of "
        "attention and a layer; without names all")  # fmt: skip
    args = parser.parse_args(arguments)
    if args.models is not None:
        for name in args.models or MODELS:
            check = partial(check_recurrent_packing, MODELS[name](), 16, seed=args.seed)
            counts = certify({f"{name}'s packing": check}, args)
            print(
                f"{name}: 0 failures in {counts['packings']} packings: logits and gradients are those of each "
                "document alone in float64, and in fp32 no bit depends on other documents"
            )
        return
    options = {"seed": args.seed, "device": args.device}
    checks = {
        "packing": partial(check_packing, **options),
        "trees": partial(check_trees, **options),
    }
    if args.device == "cpu":
        layer = small_delta_net()
        linear = partial(check_recurrent_packing, layer, layer.wo.out_features, seed=args.seed)
        checks["packing of linear attention"] = linear
    counts = certify(checks, args)
    kind = "bitwise" if args.device == "cpu" else "within the rounding of bf16"
    print(
        f"0 failures in {counts['packings']} packings: under {' and '.join(KERNELS)}, output and gradients of "
        f"{counts['packing']} documents (padding tokens included) are {kind} those of each document alone"
    )
    print(
        f"0 failures in {counts['packings']} packings of trees: under {', '.join(TREE_KERNELS)}, output and "
        f"gradients of {counts['trees']} branches are those of each branch alone, within rounding"
    )
    if args.device == "cpu":
        print("no bit of a document that goes through linear attention depends on other documents")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)  # the tensors are too small for more threads
    main()
