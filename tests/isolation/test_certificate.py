"""Packed documents are isolated: hypothesis looks for a counterexample.

The checks are those of `python -m tests.isolation.certificate`, whose oracle does not use
torchtitan.models; see there for tolerances.
"""

from dataclasses import replace

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
    attend_dense,
    certify,
    ids_of_batch,
)
from tests.isolation.packings import SEPARATORS, Segment
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


def test_command_reports_a_failure_with_its_packing(monkeypatch, capsys):
    assert isolation.main(["--packings=3"]) == 0
    assert "3 packings" in (printed := capsys.readouterr().out) and "0 failures" in printed
    monkeypatch.setattr(isolation, "CPU_KERNELS", {"broken": attend_causal})
    assert isolation.main(["--packings=20"]) == 1
    printed = capsys.readouterr().out
    assert "Segment(length=" in printed and "errors output" in printed
