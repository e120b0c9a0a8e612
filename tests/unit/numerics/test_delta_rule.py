"""The gated delta rule and its convolution, against each document alone, one token after the other, in fp64."""

import itertools
import sys
import types
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.batch.documents import document_starts
from torchtitan.batch.mask import DocumentMask
from torchtitan.numerics import delta_rule_fla, document_conv
from torchtitan.numerics.delta_rule import (
    end_rows,
    gated_delta_rule,
    gated_delta_step,
    scratch_bytes,
)

B, T, HK, HV, DK, DV, W = 2, 150, 2, 4, 6, 5, 4
# First columns of documents: at edges of chunks, several in one chunk, of one token, over several chunks.
FIRST = ([0, 16, 17, 18, 40, 64, 65, 128, 149], [0, 1, 31, 63])


def starts_of(*rows: list[int], length: int = T) -> Tensor:
    ids = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, columns in zip(ids, rows, strict=True):
        row[columns] = 1
    return document_starts(ids.cumsum(1))


def make_inputs(dtype=torch.float64, length=T, decay=3.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(B, length, *shape, generator=generator, dtype=torch.float64)

    g = -decay * draw(HV).abs()
    inputs = draw(HK, DK), draw(HK, DK), draw(HV, DV), g, draw(HV).sigmoid()
    return [
        x.to(torch.promote_types(dtype, torch.float32) if x is g else dtype).requires_grad_()
        for x in inputs
    ]


def one_by_one(q, k, v, g, beta, state=None):
    """The definition, for rows of one document."""
    heads = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), state


def each_document_alone(compute, starts: Tensor, *inputs: Tensor) -> Tensor:
    """Return compute's outputs of every document, as rows."""
    rows = []
    for row, its_starts in enumerate(starts):
        ends = [*its_starts.unique().tolist(), len(its_starts)]
        parts = [[x[row : row + 1, a:b] for x in inputs] for a, b in pairwise(ends)]
        rows.append(torch.cat([compute(*part) for part in parts], dim=1))
    return torch.cat(rows)


def grads_of(outputs, inputs: list[Tensor]):
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, inputs, factors)


def largest_difference(xs, ys) -> float:
    return max((x - y).abs().max().item() for x, y in zip(xs, ys, strict=True))


ONE_TOKEN_DOCUMENTS = list(range(T)), [0, *range(60, 70)]


@pytest.mark.parametrize(
    "chunk, decay, first",
    [
        *((chunk, 3.0, FIRST) for chunk in (1, 2, 16, 64)),
        *((None, decay, FIRST) for decay in (0.0, 1e-3, 80.0)),
        (None, 3.0, ONE_TOKEN_DOCUMENTS),
    ],
)
def test_packed_documents_equal_each_document_alone(chunk, decay, first):
    inputs, starts = make_inputs(decay=decay), starts_of(*first)
    truth = each_document_alone(lambda *x: one_by_one(*x)[0], starts, *inputs)
    out, _ = gated_delta_rule(*inputs, starts, chunk=chunk)
    found, expected = ([y, *grads_of(y, inputs)] for y in (out, truth))
    assert largest_difference(found, expected) < 1e-13


def test_row_in_two_pieces_equals_whole_row():
    inputs, starts, cut = make_inputs(), starts_of(*FIRST), 70
    whole = gated_delta_rule(*inputs, starts, return_state=True)
    before, after = (
        [x[:, part] for x in (*inputs, starts)] for part in (slice(cut), slice(cut, T))
    )
    first, state = gated_delta_rule(*before, return_state=True)
    after[-1] = after[-1] - cut
    rest = gated_delta_rule(*after, state, return_state=True)
    pieces = torch.cat((first, rest[0]), dim=1), rest[1]
    assert largest_difference(whole, pieces) < 1e-13
    assert largest_difference(grads_of(whole, inputs), grads_of(pieces, inputs)) < 1e-13


# ---- isolation ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 64])
def test_bits_and_gradients_of_document_do_not_depend_on_others(dtype, chunk):
    inputs, starts = make_inputs(dtype), starts_of(*FIRST)
    out, _ = gated_delta_rule(*inputs, starts, chunk=chunk)
    for document in (0, 17, 40, 65):  # in row 0
        own = starts == document
        own[1] = False
        changed = [torch.where(own.view(B, T, *[1] * (x.dim() - 2)), 1.5 * x, x) for x in inputs]
        again, _ = gated_delta_rule(*changed, starts, chunk=chunk)
        assert torch.equal(out[~own], again[~own])
        assert (out != again)[own].any()
        grads = torch.autograd.grad(out[own].square().sum(), inputs, retain_graph=True)
        assert not any(x[~own].any() for x in grads)


def test_decay_of_first_token_has_no_effect_and_no_gradient():
    (*inputs, g, beta), starts = make_inputs(torch.float32), starts_of(*FIRST)
    is_first = starts == torch.arange(T)
    changed = torch.where(is_first.unsqueeze(2), -1e30, g)
    outs = [gated_delta_rule(*inputs, x, beta, starts)[0] for x in (g, changed)]
    (grad,) = torch.autograd.grad(outs[0].square().sum(), [g])
    assert torch.equal(*outs) and not grad[is_first].any()


# ---- cost ----


def test_backward_keeps_inputs_and_one_state_per_sixteen_chunks():
    inputs = make_inputs(torch.float32, length=1024)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_delta_rule(*inputs, starts_of([0], [0, 700], length=1024), chunk=16)
    states = [x for x in kept if x.shape[1:] == (B, HV, DK, DV)]
    assert [len(x) for x in states] == [1024 / 16 / 16]
    assert len(kept) == len(inputs) + 1 + len(states)  # and the starts


@pytest.mark.parametrize("is_backward", [False, True])
def test_scratch_memory_is_what_the_operator_takes(is_backward):
    q, k, v = (torch.randn(1, 2048, n_heads, 64) for n_heads in (2, 2, 4))
    g, beta = -torch.rand(1, 2048, 4), torch.rand(1, 2048, 4)
    starts = starts_of([0], length=2048)
    out, _, states = torch.ops.torchtitan.gated_delta_rule(q, k, v, g, beta, starts, None, 64)
    with torch.profiler.profile(profile_memory=True) as profiler, torch.no_grad():
        if is_backward:
            inputs = (q, k, v, g, beta, starts, states)
            results = torch.ops.torchtitan.gated_delta_rule_backward(out, None, *inputs, 64)
        else:
            results = torch.ops.torchtitan.gated_delta_rule(q, k, v, g, beta, starts, None, 64)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = max(itertools.accumulate(n_bytes for _, n_bytes in changes))
    taken = peak - sum(x.nbytes for x in results)
    assert scratch_bytes(k, v, is_backward) == pytest.approx(taken, rel=0.15)


def test_compiled_code_has_one_operator_whatever_the_length():
    nodes = []

    def count_nodes(module, _):
        nodes.append([n.target for n in module.graph.nodes if n.op == "call_function"])
        return module.forward

    inputs, starts = make_inputs(torch.float32), starts_of(*FIRST)

    def compute(*tensors):
        return gated_delta_rule(*tensors, starts)[0]

    for backend in (count_nodes, "aot_eager"):
        out = torch.compile(compute, backend=backend, fullgraph=True)(*inputs)
        assert torch.equal(out, compute(*inputs))
    assert len(nodes[0]) < 5
    grads = grads_of(out, inputs), grads_of(compute(*inputs), inputs)
    assert largest_difference(*grads) == 0


# ---- generation ----


def test_prefill_and_steps_equal_whole_rows():
    """Rows of 5 and 70 tokens in one padded prefill, then three tokens one by one."""
    inputs, lengths, n_steps = [x.detach() for x in make_inputs()], torch.tensor([5, 70]), 3
    q, k, v, g, beta = inputs
    starts = torch.zeros(B, 72, dtype=torch.int32)
    padded = [x[:, :72] for x in (q, k, v)]
    g_and_beta_and_starts = end_rows(lengths, g[:, :72], beta[:, :72], starts)
    out, state = gated_delta_rule(*padded, *g_and_beta_and_starts, return_state=True)
    for row, length in enumerate(lengths.tolist()):
        own = [x[row : row + 1, : length + n_steps] for x in inputs]
        truth, last = one_by_one(*own)
        assert (out[row, :length] - truth[0, :length]).abs().max() < 1e-13
        state_of_row = state[row : row + 1]
        for t in range(length, length + n_steps):
            step, state_of_row = gated_delta_step(*(x[:, t] for x in own), state_of_row)
            assert (step - truth[:, t]).abs().max() < 1e-13
        assert (state_of_row - last).abs().max() < 1e-13


def test_row_without_tokens_keeps_its_state():
    inputs, state = [x.detach() for x in make_inputs()], torch.randn(B, HV, DK, DV).double()
    *tensors, g, beta = inputs
    ended = end_rows(torch.tensor([0, T]), g, beta, torch.zeros(B, T, dtype=torch.int32))
    _, last = gated_delta_rule(*tensors, *ended, state, return_state=True)
    assert torch.equal(last[0], state[0])


# ---- convolution ----


def conv_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((B, T, 7), (7, W))]


def test_convolution_equals_torchs_for_each_document_alone():
    (x, weight), starts = conv_inputs(), starts_of(*FIRST)

    def torch_conv(x):
        x = F.pad(x, (0, 0, W - 1, 0))
        return F.silu(F.conv1d(x.mT, weight.unsqueeze(1), groups=len(weight)).mT)

    truth = each_document_alone(torch_conv, starts, x)
    out = document_conv.document_conv(x, weight, starts)
    found, expected = ([y, *grads_of(y, [x, weight])] for y in (out, truth))
    assert largest_difference(found, expected) < 1e-13


def test_convolution_reads_nothing_of_other_documents():
    (x, weight), starts = conv_inputs(torch.float32), starts_of(*FIRST)
    is_foreign = starts != 17
    out = document_conv.document_conv(x, weight, starts)
    with torch.no_grad():
        changed = torch.where(is_foreign.unsqueeze(2), torch.nan, x)
    again = document_conv.document_conv(changed, weight, starts)
    assert torch.equal(out[~is_foreign], again[~is_foreign])
    (grad,) = torch.autograd.grad(out[~is_foreign].sum(), [x])
    assert not grad[is_foreign].any() and grad[~is_foreign].all()


def test_convolution_rounds_once_in_bf16():
    (x, weight), starts = conv_inputs(torch.bfloat16), starts_of([0], [0])
    expected = torch.zeros(B, T, 7)
    for back in range(W):
        expected[:, back:] += x.float()[:, : T - back] * weight.float()[:, W - 1 - back]
    expected = F.silu(expected.bfloat16())
    assert torch.equal(document_conv.document_conv(x, weight, starts), expected)


def test_convolution_continues_from_tail_of_rows_with_padding():
    x, weight = conv_inputs()
    starts, lengths, cut = starts_of([0, 9], [0, 39]), torch.tensor([2, 41]), 60
    starts[0] = 0
    truth = document_conv.document_conv(x, weight, starts)
    tail = document_conv.conv_tail(x[:, :cut], starts[:, :cut], lengths, W)
    for row, length in enumerate(lengths.tolist()):
        rest = x[row : row + 1, length:]
        starts_of_rest = torch.full(rest.shape[:2], -1)
        out = document_conv.document_conv(rest, weight, starts_of_rest, tail[row : row + 1])
        assert (out - truth[row : row + 1, length:]).abs().max() < 1e-13
        (grad,) = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        begin = max(length - (W - 1), 0 if row == 0 else 39)
        assert grad[row, begin:].all() and not grad[row, :begin].any()
    # The tail of a piece without tokens is the tail before it.
    kept = document_conv.conv_tail(x, starts, torch.tensor([0, 0]), W, tail)
    assert torch.equal(kept, tail)


# ---- flash-linear-attention ----


FLA_CALLS = []


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, *, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """Part of the signature of flash-linear-attention 0.6.0, and what it asks of these arguments."""
    assert q.shape == k.shape == (1, B * T, HK, DK) and v.shape == (1, B * T, HV, DV)
    assert g.shape == beta.shape == (1, B * T, HV) and g.dtype == torch.float32
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert scale == DK**-0.5 and use_qk_l2norm_in_kernel
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == B * T and (cu_seqlens.diff() > 0).all()
    FLA_CALLS.append(cu_seqlens)
    documents = pairwise(cu_seqlens.tolist())
    rows = ([x[:, a:b].double() for x in (q, k, v, g, beta)] for a, b in documents)
    return torch.cat([one_by_one(*row)[0] for row in rows], dim=1).to(v.dtype), None


@pytest.fixture
def fla(monkeypatch):
    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(delta_rule_fla, "is_supported", lambda q, v: q.dtype == torch.bfloat16)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_fla_gets_one_row_with_all_documents(fla, is_compiled):
    inputs, starts = make_inputs(torch.bfloat16), starts_of(*FIRST)
    lengths = DocumentMask(starts).with_lengths().lengths

    def compute(*tensors):
        return gated_delta_rule(*tensors, starts, cu_seqlens=lengths.cu_seq_q)[0]

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    FLA_CALLS.clear()
    out = (compiled if is_compiled else compute)(*inputs)
    assert FLA_CALLS
    expected, _ = gated_delta_rule(*inputs, starts)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=1e-3)
    for actual, wanted in zip(grads_of(out, inputs), grads_of(expected, inputs), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.01)


def test_compiler_does_not_trace_the_import_of_fla():
    def compute(x):
        return x + 1 if delta_rule_fla.is_available(torch.device("cuda")) else x - 1

    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == compute(torch.zeros(1))


def test_fla_is_not_used_on_cpu_or_with_state(fla, monkeypatch):
    inputs, starts = make_inputs(torch.bfloat16), starts_of(*FIRST)
    monkeypatch.setattr(delta_rule_fla, "gated_delta_rule", None)
    cu_seqlens = DocumentMask(starts).with_lengths().lengths.cu_seq_q
    gated_delta_rule(*inputs, starts, cu_seqlens=cu_seqlens, return_state=True)
    monkeypatch.undo()
    assert not delta_rule_fla.is_supported(inputs[0], inputs[2])
