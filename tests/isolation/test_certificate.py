"""Packed documents are isolated: hypothesis looks for a counterexample.

The checks are those of `python -m tests.isolation.certificate`, whose oracle does not use
torchtitan.models; see there for tolerances.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.isolation import certificate as isolation
from tests.isolation.certificate import (
    ACCELERATOR_KERNELS,
    ACCELERATOR_SHAPES,
    Case,
    Certificate,
    Subject,
    attend_alone,
    attend_dense,
    certify,
    ids_of_batch,
)
from tests.isolation.packings import (
    SEPARATORS,
    Segment,
    make_batch,
    random_packing,
    read_documents,
    row_length,
    smaller_packings,
    spans_of,
)
from torchtitan.batch.mask import DocumentMask

MAX_TOKENS = 24


@st.composite
def packings(draw):
    """Draw rows of one length, cut anywhere; any piece may be padding."""
    seq_len = draw(st.integers(1, MAX_TOKENS))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, seq_len)))
        bounds = sorted(cuts | {0, seq_len})
        firsts = st.one_of(st.just(0), st.none(), st.integers(0, 40))
        pieces = zip(bounds, bounds[1:], strict=False)
        rows.append(tuple(Segment(end - start, draw(firsts)) for start, end in pieces))
    return tuple(rows)


@given(packing=packings(), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_every_separator_reads_back_the_packing_that_was_written(packing, seed):
    for separator in SEPARATORS:
        batch = make_batch(packing, separator, random.Random(seed))
        assert read_documents(batch, separator) == spans_of(packing)


@given(
    packing=packings(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (3, 1), (1, 1)]),
    head_dim=st.sampled_from([8, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_packed_documents_give_outputs_and_gradients_of_documents_alone(
    packing, heads, head_dim, seed
):
    case = Case(packing, seed, *heads, head_dim)
    assert Certificate().check(case) == []


@given(packing=packings(), seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_packed_documents_give_logits_and_parameter_gradients_of_documents_alone(packing, seed):
    assert Certificate().check(Case(packing, seed, with_decoder=True)) == []


def test_sixty_drawn_packings_are_isolated_bitwise_on_the_cpu():
    certificate = Certificate()
    assert certify(certificate, 60, seed=1) is None
    tally = certificate.tally
    assert tally.bitwise_documents == tally.documents > 500
    assert {separator for separator, _ in tally.cases} == set(SEPARATORS)
    assert max(tally.forward_error.values()) < 5e-6


def test_bf16_documents_are_isolated_within_its_rounding():
    """The settings of accelerators, run on the CPU."""
    shapes = replace(ACCELERATOR_SHAPES, device="cpu")
    certificate = Certificate(Subject(kernels=ACCELERATOR_KERNELS), shapes)
    assert certify(certificate, 8) is None
    assert set(certificate.tally.forward_error) == {"sdpa", "flex", "varlen"}


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (4, 2)])
def test_oracle_agrees_with_autograd_over_plain_attention(n_heads, n_kv_heads):
    generator = torch.Generator().manual_seed(0)
    sizes = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    q, k, v, grad = (torch.randn(n, 7, 8, generator=generator).double() for n in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(n_heads // n_kv_heads, 0) for x in (k, v))
    scores = (q @ keys.transpose(1, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    out = scores.softmax(-1) @ values
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for x, y in zip(
        attend_alone(*(x.detach().numpy() for x in (q, k, v, grad))), expected, strict=True
    ):
        np.testing.assert_allclose(x, y.numpy(), rtol=1e-12, atol=1e-12)


def test_random_packings_hold_every_kind_of_row():
    rng = random.Random(0)
    rows = [row for _ in range(300) for row in random_packing(rng, 2, 20)]
    assert all(sum(segment.length for segment in row) == 20 for row in rows)
    is_padding = [[segment.first_position is None for segment in row] for row in rows]
    assert any(all(row) for row in is_padding)
    assert any(row[-1] and not all(row) for row in is_padding)  # at the end
    assert any(True in row[:-1] and not row[-1] for row in is_padding)  # in the middle
    assert any(len(row) == 1 and not row[0] for row in is_padding)  # one document
    assert any(row[0].first_position for row in rows)  # begins inside a document
    assert any(all(segment.length == 1 for segment in row) for row in rows)


@given(packing=packings())
@settings(max_examples=30, deadline=None)
def test_smaller_packings_are_smaller_and_well_formed(packing):
    for smaller in smaller_packings(packing):
        assert len({sum(segment.length for segment in row) for row in smaller}) == 1
        assert (len(smaller), row_length(smaller)) < (len(packing), row_length(packing) + 1)


# ---- the certificate catches what it is there to catch ----


def attend_causal(q, k, v, document_ids):
    """The mask argument is dropped."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def keys_leak(q, k, v, document_ids):
    """The right output; the gradient of keys is that of plain causal attention."""
    leaky = attend_causal(q.detach(), k, v.detach(), document_ids)
    return attend_dense(q, k.detach(), v, document_ids) + leaky - leaky.detach()


def nan_in_the_gradient_of_values(q, k, v, document_ids):
    v = v.clone()
    v.register_hook(lambda grad: grad * torch.nan)
    return attend_dense(q, k, v, document_ids)


def raising(q, k, v, document_ids):
    raise NotImplementedError("no such kernel")


def boundaries_a_token_late(batch, attn_mask_type):
    return ids_of_batch(batch, attn_mask_type).roll(1, dims=1)


def ignore_the_mask_in_the_second_layer(decoder):
    attention = decoder.layers["1"].attention
    forward = attention.forward
    attention.forward = lambda x, rope, masks=None: forward(
        x, rope, DocumentMask.from_rows(*x.shape[:2], x.device)
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"kernels": {"broken": attend_causal}},
        {"kernels": {"broken": keys_leak}},
        {"kernels": {"broken": nan_in_the_gradient_of_values}},
        {"kernels": {"broken": raising}},
        {"document_ids": boundaries_a_token_late},
        {"prepare_decoder": ignore_the_mask_in_the_second_layer},
    ],
)
def test_broken_separator_kernel_and_decoder_are_caught(broken):
    assert certify(Certificate(Subject(**broken)), 20, decoder_every=1) is not None


def test_command_reports_a_failure_with_its_smallest_packing(monkeypatch, capsys):
    assert isolation.main(["--packings=3"]) == 0
    assert "3 packings" in (printed := capsys.readouterr().out) and "0 failures" in printed
    monkeypatch.setattr(isolation, "CPU_KERNELS", {"broken": attend_causal})
    assert isolation.main(["--packings=20"]) == 1
    printed = capsys.readouterr().out
    assert "row 0: 1 from position" in printed and "errors output" in printed
