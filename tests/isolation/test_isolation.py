"""Packed documents are isolated: hypothesis looks for a counterexample.

A packing is written into a batch in six ways, which all have to read as its documents. Kernels get the
documents that were read: their outputs and gradients, and those of a decoder, have to be those of each
document alone, by torch's own causal attention.

B rows, T tokens, H query heads, K key/value heads, D head size, V vocabulary entries.
"""

import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.isolation.leaks import LEAKS
from tests.isolation.packings import (
    EOS_ID,
    LARGEST_FIRST_POSITION,
    SEPARATORS,
    VOCAB_SIZE,
    Segment,
    make_batch,
    spans_of,
)
from torchtitan.batch.documents import document_starts, read_document_ids
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models import gated_delta
from torchtitan.models.gated_delta import GatedDeltaNet
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.testing import isolation
from torchtitan.testing.isolation import KERNELS

MAX_TOKENS = 24


@st.composite
def packings(draw):
    """Draw rows of one length, cut anywhere; any piece may be padding."""
    seq_len = draw(st.integers(1, MAX_TOKENS))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        bounds = sorted(draw(st.sets(st.integers(1, seq_len))) | {0, seq_len})
        firsts = st.one_of(st.just(0), st.none(), st.integers(0, LARGEST_FIRST_POSITION))
        rows.append(tuple(Segment(end - start, draw(firsts)) for start, end in pairwise(bounds)))
    return tuple(rows)


@given(packing=packings(), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_every_way_to_write_a_packing_reads_as_its_documents(packing, seed):
    expected = [[a for a, b in row for _ in range(b - a)] for row in spans_of(packing)]
    for separator, mask_type in SEPARATORS.items():
        batch = make_batch(packing, separator, random.Random(seed))
        starts = document_starts(read_document_ids(batch, mask_type, EOS_ID))
        assert starts.tolist() == expected, separator


# ---- kernels ----


def problems_of(n_packings, device="cpu"):
    """Problems that the shipped certificate finds in its first packings."""
    return [x for i in range(n_packings) for x in isolation.check_packing(i, device=device)[0]]


def test_sixty_packings_of_the_certificate_are_isolated_bitwise():
    assert problems_of(60) == []


def recurrent_problems(layer, n_packings):
    """Yield problems that the certificate finds in a layer with a recurrent state."""
    for index in range(n_packings):
        yield from isolation.check_recurrent_packing(layer, 16, index)[0]


def test_twenty_packings_through_linear_attention_are_isolated_bitwise():
    assert [*recurrent_problems(isolation.small_delta_net(), 20)] == []


@pytest.mark.parametrize("leak", LEAKS)
def test_certificate_reports_a_leak_of_linear_attention(leak, monkeypatch):
    ((name, broken),) = LEAKS[leak].items()
    if name == "forward":
        forward = GatedDeltaNet.forward
        monkeypatch.setattr(
            GatedDeltaNet, name, lambda self, *x: broken(partial(forward, self))(*x)
        )
    else:
        monkeypatch.setattr(gated_delta, name, broken(getattr(gated_delta, name)))
    assert next(recurrent_problems(isolation.small_delta_net(), 40), None)


def attend_causal(q, k, v, document_ids):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def keys_leak(q, k, v, document_ids):
    """The right output; the gradient of keys is that of plain causal attention."""
    leaky = attend_causal(q.detach(), k, v.detach(), document_ids)
    return KERNELS["varlen"](q, k.detach(), v, document_ids) + leaky - leaky.detach()


def nan_in_the_gradient_of_values(q, k, v, document_ids):
    v = v.clone()
    v.register_hook(lambda grad: grad * torch.nan)
    return KERNELS["varlen"](q, k, v, document_ids)


def boundaries_a_token_late(*batch):
    return read_document_ids(*batch).roll(1, dims=1)


@pytest.mark.parametrize("broken", [attend_causal, keys_leak, nan_in_the_gradient_of_values, None])
def test_certificate_reports_a_broken_kernel_and_boundaries_that_are_late(
    broken, monkeypatch, capsys
):
    if broken:
        monkeypatch.setattr(isolation, "KERNELS", {"broken": broken})
    else:
        monkeypatch.setattr(isolation, "read_document_ids", boundaries_a_token_late)
    with pytest.raises(SystemExit):
        isolation.main(["--packings=20"])
    printed = capsys.readouterr().out
    assert "documents are not isolated in packing" in printed and "row 0: positions" in printed


def test_certificate_checks_whole_models_and_reports_a_leak_in_one(monkeypatch, capsys):
    isolation.main(["--packings=3"])
    assert "0 failures in 3 packings: under flex and varlen" in capsys.readouterr().out
    packings = ["--models", "qwen3_5_moe", "--packings=3"]
    isolation.main(packings)
    assert "qwen3_5_moe: 0 failures in 3 packings" in capsys.readouterr().out
    ((name, broken),) = LEAKS["state kept"].items()
    monkeypatch.setattr(gated_delta, name, broken(getattr(gated_delta, name)))
    with pytest.raises(SystemExit):
        isolation.main(packings)


# ---- the whole decoder ----


def build_decoder(attn_type, attn_mask_type):
    """Two layers of llama3, the same weights for every kind of attention."""
    sizes = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, vocab_size=VOCAB_SIZE)
    attention = dict(attn_type=attn_type, attn_mask_type=attn_mask_type)
    args = TransformerModelArgs(max_seq_len=LARGEST_FIRST_POSITION + 64, **sizes, **attention)
    return with_large_weights(Transformer(args))


def with_large_weights(decoder):
    with torch.no_grad(), seeded_init(decoder, 0):
        decoder.init_weights()
        for parameter in decoder.parameters():
            if parameter.dim() == 2:  # as drawn, attention would hardly look at anything
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return decoder


def factors(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gradients_of(decoder, logits, cotangent):
    return torch.autograd.grad(logits, list(decoder.parameters()), cotangent)


def run_decoder(decoder, batch):
    """Logits [B, T, V] and the gradient of every parameter."""
    tokens, boundaries = batch["input"], {k: x for k, x in batch.items() if k != "input"}
    masks = decoder.get_attention_masks(tokens, SimpleNamespace(eos_id=EOS_ID), boundaries)
    logits = decoder(tokens, attention_masks=masks, positions=batch.get("positions"))
    return [logits.detach(), *gradients_of(decoder, logits, factors(logits.shape))]


def run_decoder_alone(plain, batch, spans):
    """The same, each document in a call of its own, with the positions it has in the batch."""
    tokens = batch["input"]
    positions = batch.get("positions", torch.arange(tokens.shape[1]).expand(tokens.shape))
    logits = torch.empty(*tokens.shape, VOCAB_SIZE)
    cotangent = factors(logits.shape)
    gradients = [torch.zeros_like(p) for p in plain.parameters()]
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            part = slice(row, row + 1), slice(start, end)
            out = plain(tokens[part], positions=positions[part])
            logits[part] = out.detach()
            added = gradients_of(plain, out, cotangent[part])
            gradients = [x + y for x, y in zip(gradients, added, strict=True)]
    return [logits, *gradients]


@given(packings(), st.sampled_from(list(SEPARATORS)), st.sampled_from(["flex", "varlen"]))
@settings(max_examples=25, deadline=None)
def test_packed_documents_give_logits_and_parameter_gradients_of_documents_alone(
    packing, separator, attn_type
):
    batch = make_batch(packing, separator, random.Random(0))
    packed = run_decoder(build_decoder(attn_type, SEPARATORS[separator]), batch)
    alone = run_decoder_alone(build_decoder("sdpa", "causal"), batch, spans_of(packing))
    # Gradients are sums over all tokens: measured against the parameter's largest gradient.
    for found, expected in zip(packed, alone, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
