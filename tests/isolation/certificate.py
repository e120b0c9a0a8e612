"""A certificate that packed documents are isolated from each other.

    python -m tests.isolation.certificate                 10,000 random packings
    python -m tests.isolation.certificate --seconds 60    as many as fit

What `torchtitan.testing.isolation` certifies in short, in every way that we know. Every packing is
written into a batch in six ways (see `packings.py`). For each of them and each kernel, the output
of the packed rows and the gradients of queries, keys and values have to be those of every document
alone, by

- attention written out in NumPy, float64, one document at a time, forward and backward: what is
  left is the kernel's own rounding;
- torch's own causal attention called on one document at a time: on the CPU, flex and varlen
  agree with it to the last bit.

On the CPU every 20th packing goes through a whole decoder as well: its logits, and the gradient of every
parameter, against a plain causal decoder that gets the documents one at a time.

B rows, T tokens, H query heads, K key/value heads, D head size.
"""

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.isolation.packings import (
    EOS_ID,
    LARGEST_FIRST_POSITION,
    SEPARATORS,
    VOCAB_SIZE,
    Packing,
    make_batch,
    random_packing,
    read_documents,
    row_length,
    spans_of,
)
from torchtitan.batch.documents import document_starts, read_document_ids
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.testing.isolation import (
    KERNELS,
    AttentionFunction,
    Inputs,
    Spans,
    run_alone,
    run_packed,
)

DECODER_EVERY = 20


# ---- what is under test ----


def ids_of_batch(batch: dict[str, Tensor], attn_mask_type: str) -> Tensor:
    """Document ids [B, T], as a model reads them."""
    return read_document_ids(batch, attn_mask_type, EOS_ID)


def dense_document_mask(document_ids: Tensor) -> Tensor:
    """bool [B, 1, T, T], queries by keys: causal, within one document, padding by itself."""
    starts = document_starts(document_ids)
    column = torch.arange(starts.shape[1], device=starts.device)
    query, key = column[:, None], column[None, :]
    return ((key <= query) & (key >= starts[:, :, None])).unsqueeze(1)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    """torch's scaled dot product attention with the whole mask written out: T * T per row."""
    mask = dense_document_mask(document_ids)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _attend_flex_blocks(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    """Flex as if a client had built the mask: block structure and mask function alone."""
    mask = DocumentMask.from_documents(document_ids).block_mask(block_size=16)
    return attend(build_inner_attention("flex"), q, k, v, mask)


CPU_KERNELS: dict[str, AttentionFunction] = {
    "sdpa": attend_dense,
    "flex": KERNELS["flex"],
    "flex, client's mask": _attend_flex_blocks,
    "varlen": KERNELS["varlen"],
}
ACCELERATOR_KERNELS = {name: CPU_KERNELS[name] for name in ("sdpa", "flex", "varlen")}
# These promise, on the CPU, a document's numbers to the last bit wherever it is packed.
BITWISE_KERNELS = ("flex", "varlen")
# Through how many separators, drawn at random, a kernel goes per packing; the others go through
# all. Making a BlockMask takes longer than anything else here.
SEPARATORS_PER_PACKING = {"sdpa": 1, "flex": 3, "flex, client's mask": 1}


@dataclass(frozen=True)
class Subject:
    """What is certified; tests replace parts of it by broken ones.

    document_ids: (batch, attn_mask_type) -> [B, T].
    kernels: by name.
    prepare_decoder: called once for each decoder that gets packed batches.
    """

    document_ids: Callable[[dict[str, Tensor], str], Tensor] = ids_of_batch
    kernels: Mapping[str, AttentionFunction] = field(default_factory=lambda: CPU_KERNELS)
    prepare_decoder: Callable[[nn.Module], None] = lambda decoder: None


@dataclass(frozen=True)
class Shapes:
    """What cases are drawn from, and how exact their results have to be.

    fixed_seq_len: None draws T up to 64; accelerators would compile for every shape.
    tolerance: largest absolute error. Outputs are of order 1, gradients up to about 10.
    bitwise: whether `BITWISE_KERNELS` have to agree with torch on each document to the last bit.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    fixed_seq_len: int | None = None
    heads: tuple[tuple[int, int], ...] = ((4, 4), (4, 2), (4, 1), (2, 2), (3, 1), (1, 1))
    head_dims: tuple[int, ...] = (8, 16)
    tolerance: float = 1e-5
    bitwise: bool = True


CPU_SHAPES = Shapes()
# bf16, as variable-length attention takes nothing longer there: 8 bits on sums of order 10.
ACCELERATOR_SHAPES = Shapes(
    "cuda", torch.bfloat16, 256, ((4, 4), (4, 2)), (64,), tolerance=0.1, bitwise=False
)


@dataclass(frozen=True)
class Case:
    """One packing with everything else that a check of it needs."""

    packing: Packing
    seed: int = 0
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    with_decoder: bool = False


def random_case(index: int, seed: int = 0, shapes: Shapes = CPU_SHAPES) -> Case:
    """The case with this number. Four in a row have one shape, so that a stale mask would fit."""
    shape_rng = random.Random(f"shape {seed} {index // 4}")
    seq_len = shape_rng.choice([shape_rng.randint(1, 8), shape_rng.randint(1, 64)])
    n_rows = shape_rng.randint(1, 3)
    if shapes.fixed_seq_len is not None:
        n_rows, seq_len = 2, shapes.fixed_seq_len

    rng = random.Random(f"case {seed} {index}")
    n_heads, n_kv_heads = rng.choice(shapes.heads)
    return Case(
        random_packing(rng, n_rows, seq_len),
        rng.randrange(2**31),
        n_heads,
        n_kv_heads,
        rng.choice(shapes.head_dims),
    )


# ---- the oracle ----


def attend_alone(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, grad_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Causal attention of one document, and its gradients, written out in float64.

    q, grad_out: [H, L, D]; k, v: [K, L, D], key head i serving query heads i * H / K and up.
    Returns (out, grad_q, grad_k, grad_v).
    """
    group = q.shape[0] // k.shape[0]
    scale = q.shape[-1] ** -0.5
    keys, values = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ keys.transpose(0, 2, 1) * scale
    scores[:, np.triu(np.ones(scores.shape[1:], dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ values
    grad_weights = grad_out @ values.transpose(0, 2, 1)
    mean = (grad_out * out).sum(axis=-1, keepdims=True)
    grad_scores = weights * (grad_weights - mean) * scale
    grad_keys = grad_scores.transpose(0, 2, 1) @ q
    grad_values = weights.transpose(0, 2, 1) @ grad_out
    shared = (k.shape[0], group, *k.shape[1:])
    return (
        out,
        grad_scores @ keys,
        grad_keys.reshape(shared).sum(axis=1),
        grad_values.reshape(shared).sum(axis=1),
    )


def _expected(inputs: Inputs, spans: Spans) -> list[Tensor]:
    """Output [B, H, T, D] and gradients of q, k, v from documents alone; float64, on the CPU."""
    q, k, v, grad_out = (x.detach().cpu().double().numpy() for x in inputs)
    results = [np.empty_like(x) for x in (q, q, k, v)]
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            parts = attend_alone(*(x[row, :, start:end] for x in (q, k, v, grad_out)))
            for result, part in zip(results, parts, strict=True):
                result[row, :, start:end] = part
    return [torch.from_numpy(x) for x in results]


# ---- one case ----


def _draw_inputs(case: Case, shapes: Shapes) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    n_rows, seq_len = len(case.packing), row_length(case.packing)

    def draw(n_heads: int) -> Tensor:
        # Heads in the third place, as projections leave them.
        x = torch.randn(n_rows, seq_len, n_heads, case.head_dim, generator=generator)
        return x.to(shapes.device, shapes.dtype).transpose(1, 2)

    heads = (case.n_heads, case.n_kv_heads, case.n_kv_heads, case.n_heads)
    q, k, v, grad_out = (draw(n) for n in heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out


@dataclass
class Tally:
    """What has been checked so far, and the largest errors."""

    packings: int = 0
    tokens: int = 0
    documents: int = 0
    bitwise_documents: int = 0
    cases: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    forward_error: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gradient_error: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: list[str] = field(default_factory=list)

    def note(self, separator: str, kernel: str, forward: float, gradient: float) -> None:
        self.cases[separator, kernel] += 1
        self.forward_error[kernel] = _largest(self.forward_error[kernel], forward)
        self.gradient_error[kernel] = _largest(self.gradient_error[kernel], gradient)


class Certificate:
    """Checks cases of one subject and keeps the tally."""

    def __init__(self, subject: Subject | None = None, shapes: Shapes = CPU_SHAPES):
        self.subject = subject or Subject()
        self.shapes = shapes
        self.tally = Tally()
        self._decoders: dict[tuple[str, str], nn.Module] = {}

    def check(self, case: Case) -> list[str]:
        """Return what is wrong with a case, one line each; nothing if it is right."""
        spans = spans_of(case.packing)
        inputs = _draw_inputs(case, self.shapes)
        expected = _expected(inputs, spans)
        alone = run_alone(inputs, spans) if self.shapes.bitwise else None
        failures = []
        rng = random.Random(case.seed)
        batches = {name: make_batch(case.packing, name, rng) for name in SEPARATORS}
        for separator, batch in batches.items():
            assert read_documents(batch, separator) == spans, "the batch is not what was asked for"
        for name in self.subject.kernels:
            n_separators = SEPARATORS_PER_PACKING.get(name, len(SEPARATORS))
            for separator in rng.sample(list(SEPARATORS), n_separators):
                batch = batches[separator]
                problem = self._check_kernel(separator, name, batch, inputs, expected, alone)
                failures += [f"{separator}, {name}: {problem}"] if problem else []
        if case.with_decoder:
            separator = rng.choice(list(SEPARATORS))
            for attn_type in ("flex", "varlen"):
                problem = self._check_decoder(separator, attn_type, batches[separator], spans)
                failures += [f"{separator}, decoder with {attn_type}: {problem}"] if problem else []
        n_documents = sum(len(row) for row in spans)
        self.tally.packings += 1
        self.tally.tokens += len(case.packing) * row_length(case.packing)
        self.tally.documents += n_documents
        self.tally.bitwise_documents += n_documents if alone and not failures else 0
        return failures

    def _check_kernel(
        self,
        separator: str,
        name: str,
        batch: dict[str, Tensor],
        inputs: Inputs,
        expected: list[Tensor],
        alone: list[Tensor] | None,
    ) -> str | None:
        batch = {key: value.to(self.shapes.device) for key, value in batch.items()}
        try:
            document_ids = self.subject.document_ids(batch, SEPARATORS[separator])
            results = run_packed(self.subject.kernels[name], inputs, document_ids)
        except Exception as error:  # whatever it is, the packing could not be computed
            return f"raised {type(error).__name__}: {error}"
        errors = [_max_error(x, y) for x, y in zip(results, expected, strict=True)]
        self.tally.note(separator, name, errors[0], _largest(*errors[1:]))
        if not _largest(*errors) <= self.shapes.tolerance:
            return "errors " + _named(errors, "output", "grad q", "grad k", "grad v")
        if alone is not None and name in BITWISE_KERNELS:
            pairs = zip(results, alone, strict=True)
            if not all(torch.equal(packed, single) for packed, single in pairs):
                return "not bitwise equal to the documents alone"
        return None

    def _check_decoder(
        self, separator: str, attn_type: str, batch: dict[str, Tensor], spans: Spans
    ) -> str | None:
        decoder = self._decoder(attn_type, SEPARATORS[separator])
        plain = self._decoder("sdpa", "causal")
        try:
            packed = _run_decoder(decoder, batch)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
        alone = _run_decoder_alone(plain, batch, spans)
        logit_error = _max_error(packed[0], alone[0])
        # Sums over all tokens: measured against the parameter's largest gradient.
        gradient_error = _largest(
            *(
                _max_error(x, y) / max(1.0, float(y.abs().max()))
                for x, y in zip(packed[1:], alone[1:], strict=True)
            )
        )
        self.tally.note(separator, f"decoder, {attn_type}", logit_error, gradient_error)
        if not _largest(logit_error, gradient_error) <= self.shapes.tolerance:
            return "errors " + _named([logit_error, gradient_error], "logits", "gradients")
        return None

    def _decoder(self, attn_type: str, attn_mask_type: str) -> nn.Module:
        key = attn_type, attn_mask_type
        if key not in self._decoders:
            self._decoders[key] = _build_decoder(*key)
            if attn_type != "sdpa":
                self.subject.prepare_decoder(self._decoders[key])
        return self._decoders[key]


def _largest(*errors: float) -> float:
    """nan if one of them is, where Python's max may pass over it."""
    return float(np.max(errors))


def _max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; nan if there is a nan."""
    return float((actual.cpu().double() - expected.double()).abs().max())


def _named(errors: list[float], *names: str) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))


# ---- the whole decoder ----


def _build_decoder(attn_type: str, attn_mask_type: str) -> nn.Module:
    """Two layers of llama3, the same weights for every kind of attention."""
    from torchtitan.distributed.seeded_init import seeded_init
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    args = TransformerModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, multiple_of=16,
        max_seq_len=LARGEST_FIRST_POSITION + 64, attn_type=attn_type, attn_mask_type=attn_mask_type,
    )  # fmt: skip
    decoder = Transformer(args)
    with torch.no_grad(), seeded_init(decoder, 0):
        decoder.init_weights()
        for parameter in decoder.parameters():
            if parameter.dim() == 2:  # as drawn, attention would hardly look at anything
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return decoder


def _run_decoder(decoder: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Logits [B, T, V] and the gradient of every parameter."""
    tokens = batch["input"]
    boundaries = {key: value for key, value in batch.items() if key != "input"}
    masks = decoder.get_attention_masks(tokens, SimpleNamespace(eos_id=EOS_ID), boundaries)
    logits = decoder(tokens, attention_masks=masks, positions=batch.get("positions"))
    return [logits.detach(), *_decoder_gradients(decoder, logits, _cotangent(logits.shape))]


def _run_decoder_alone(plain: nn.Module, batch: dict[str, Tensor], spans: Spans) -> list[Tensor]:
    """The same, each document in a call of its own, with the positions it has in the batch."""
    tokens = batch["input"]
    positions = batch.get("positions", torch.arange(tokens.shape[1]).expand(tokens.shape))
    logits = torch.empty(*tokens.shape, VOCAB_SIZE)
    cotangent = _cotangent(logits.shape)
    gradients = [torch.zeros_like(p) for p in plain.parameters()]
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            part = slice(row, row + 1), slice(start, end)
            out = plain(tokens[part], positions=positions[part])
            logits[part] = out.detach()
            added = _decoder_gradients(plain, out, cotangent[part])
            gradients = [x + y for x, y in zip(gradients, added, strict=True)]
    return [logits, *gradients]


def _decoder_gradients(decoder: nn.Module, logits: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(logits, list(decoder.parameters()), cotangent)


def _cotangent(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ---- many cases ----


def certify(
    certificate: Certificate,
    n_packings: int,
    *,
    seconds: float = float("inf"),
    seed: int = 0,
    max_failures: int = 1,
    decoder_every: int = DECODER_EVERY,
    report_every_seconds: float = 10.0,
) -> Case | None:
    """Check random packings until one of the limits; return the first case that failed.

    The tally is in `certificate.tally`; what failed, in its `failures`. Prints its progress.
    """
    shapes, tally = certificate.shapes, certificate.tally
    first_failure = None
    started = last_report = time.monotonic()
    for i in range(n_packings):
        with_decoder = shapes.fixed_seq_len is None and i % decoder_every == 0
        case = replace(random_case(i, seed, shapes), with_decoder=with_decoder)
        problems = certificate.check(case)
        tally.failures += [f"packing {i}: {problem}" for problem in problems]
        first_failure = first_failure or (case if problems else None)
        now = time.monotonic()
        if now - last_report >= report_every_seconds:
            last_report = now
            print(f"{i + 1} packings, {len(tally.failures)} failures, {now - started:.0f} s")
        if len(tally.failures) >= max_failures or now - started >= seconds:
            break
    return first_failure


def report(tally: Tally, wall_seconds: float, cpu_seconds: float) -> str:
    """The tally as text."""
    lines = [
        f"{tally.packings} packings, {tally.documents} documents (padding tokens counted), "
        f"{tally.tokens} tokens, {sum(tally.cases.values())} cases; "
        f"{wall_seconds:.0f} s, {cpu_seconds:.0f} s of CPU",
        *(f"{separator}, {kernel}: {n}" for (separator, kernel), n in tally.cases.items()),
        *(f"{name}: largest error of the output {error:.1e}, of gradients "
          f"{tally.gradient_error[name]:.1e}" for name, error in tally.forward_error.items()),
        f"{tally.bitwise_documents} documents bitwise as alone, by flex and varlen",
        f"{len(tally.failures)} failures",
    ]  # fmt: skip
    return "\n".join(lines)


def _run_certificate(args: argparse.Namespace) -> int:
    shapes, subject = CPU_SHAPES, Subject()
    if args.device != "cpu":
        shapes = replace(ACCELERATOR_SHAPES, device=args.device)
        subject = Subject(kernels=ACCELERATOR_KERNELS)
    certificate = Certificate(subject, shapes)
    wall, cpu = time.monotonic(), time.process_time()
    failed = certify(certificate, args.packings, seconds=args.seconds, seed=args.seed)
    print(report(certificate.tally, time.monotonic() - wall, time.process_time() - cpu))
    if failed is None:
        return 0
    print("\n".join([*certificate.tally.failures, str(failed)]))
    return 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.isolation.certificate",
        description="Certify that packed documents don't see each other.",
    )
    parser.add_argument("--packings", type=int, default=10_000, help="how many (10,000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--seed", type=int, default=0, help="which packings are drawn (0)")
    parser.add_argument(
        "--device", default="cpu", help="cpu (fp32), or an accelerator (bf16; try 200 packings)"
    )
    return _run_certificate(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)  # nothing here is large enough for two
    sys.exit(main())
