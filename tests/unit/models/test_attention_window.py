"""Sliding windows within documents, and gradients through the log-sum-exp of the scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from torchtitan.batch.documents import PADDING
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import attend, build_inner_attention


def allowed_pairs(document_ids, window=None):
    """bool [B, T, T]: causal, within a run of equal ids and the window; padding sees only itself."""
    columns = torch.arange(document_ids.shape[1])
    distance = columns[:, None] - columns
    # Here every document has its own id, so that equal ids are one run.
    same = (document_ids[:, :, None] == document_ids[:, None]) & (document_ids != PADDING)[:, None]
    allowed = (same & (distance >= 0)) | (distance == 0)
    return allowed if window is None else allowed & (distance < window)


def dense(q, k, v, allowed, scale=None):
    """(output [B, H, T, Dv], log-sum-exp [B, H, T]) in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def tensors(n_rows, seq_len, n_heads, n_kv_heads, head_dim=8, value_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, value_dim)]
    return [
        torch.randn(n_rows, heads, seq_len, size, generator=generator).to(dtype).requires_grad_()
        for heads, size in shapes
    ]


def ids_of(*rows):
    """Document ids from lengths; a negative length is padding."""
    return torch.tensor(
        [
            [PADDING if n < 0 else i for i, n in enumerate(row) for _ in range(abs(n))]
            for row in rows
        ]
    )


@st.composite
def packings(draw):
    """Ids [B, T] with documents shorter and longer than a chunk of the windowed operator."""
    seq_len = draw(st.integers(1, 160))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = draw(
            st.lists(
                st.one_of(st.integers(-3, -1), st.integers(1, 9), st.integers(60, 140)),
                min_size=1,
                max_size=8,
            )
        )
        rows.append((ids_of(lengths)[0].tolist() + [len(lengths)] * seq_len)[:seq_len])
    return torch.tensor(rows)


@settings(max_examples=25, deadline=None)
@given(packings(), st.sampled_from([(2, 2), (4, 1)]), st.sampled_from([None, 1, 2, 7, 64, 130]))
def test_window_and_log_sum_exp_with_gradients_equal_dense_attention(ids, heads, window):
    inputs = tensors(*ids.shape, *heads)
    expected_out, expected_lse = dense(*inputs, allowed_pairs(ids, window), scale=0.5)
    expected_out, expected_lse = expected_out.transpose(1, 2), expected_lse.transpose(1, 2)
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (
        torch.randn(x.shape, generator=generator) for x in (expected_out, expected_lse)
    )
    expected_grads = torch.autograd.grad(
        (expected_out, expected_lse), inputs, (grad_out.double(), grad_lse.double())
    )
    documents = DocumentMask.from_documents(ids)
    metadata = documents.lower("varlen").lowered  # which has no window
    for attn_type, mask, of_layer in (
        ("flex", documents.with_window(window), None),
        ("varlen", documents.with_window(window), None),
        ("varlen", metadata, window),
    ):
        wrapper = build_inner_attention(attn_type)
        out, lse = attend(wrapper, *inputs, mask, 0.5, window=of_layer, return_lse=True)
        assert lse.dtype == torch.float32
        grads = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
        # fp32 sums of up to 140 terms of order 1
        for got, want in zip(
            (out, lse, *grads), (expected_out, expected_lse, *expected_grads), strict=True
        ):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("used", ["output", "lse"])
def test_gradient_is_right_when_only_one_result_is_used(used):
    ids = ids_of([5, 1, 9, -2])
    inputs = tensors(*ids.shape, 4, 2, dtype=torch.float64)
    which = ["output", "lse"].index(used)
    expected = dense(*inputs, allowed_pairs(ids, 4))[which].transpose(1, 2)
    mask = DocumentMask.from_documents(ids).with_window(4)
    actual = attend(build_inner_attention("flex"), *inputs, mask, return_lse=True)[which]
    weight = torch.arange(actual.numel(), dtype=torch.float64).view(actual.shape)
    for got, want in zip(
        torch.autograd.grad((actual * weight).sum(), inputs, materialize_grads=True),
        torch.autograd.grad((expected * weight).sum(), inputs, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_key_gradients_of_a_window_are_summed_before_they_are_rounded_to_bf16():
    ids = ids_of([300])
    inputs = tensors(1, 300, 2, 1, dtype=torch.bfloat16)
    out, lse = attend(
        build_inner_attention("varlen"),
        *inputs,
        DocumentMask.from_documents(ids).with_window(200),
        return_lse=True,
    )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = dense(*inputs, allowed_pairs(ids, 200))
    grad = torch.ones_like(out)
    (actual,) = torch.autograd.grad(out, inputs[2:], grad)
    (wanted,) = torch.autograd.grad(expected, inputs[2:], grad.transpose(1, 2).double())
    # Half a unit of bf16's last place, because only the result is rounded.
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=2**-8, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(packings(), st.sampled_from([4, 16]), st.sampled_from([1, 3, 16, 50]))
def test_windowed_block_mask_from_boundaries_equals_the_evaluated_one(ids, block_size, window):
    n_rows, seq_len = ids.shape
    whole_rows = DocumentMask.from_rows(n_rows, seq_len, ids.device).with_window(window)
    for documents, mask in (
        (ids, DocumentMask.from_documents(ids).with_window(window)),
        (ids[:1] * 0, whole_rows),
    ):
        mask = mask.block_mask(block_size)
        allowed = allowed_pairs(documents, window)

        def by_lookup(b, h, q_idx, kv_idx, allowed=allowed):
            return allowed[b, q_idx, kv_idx]

        wanted = create_block_mask(
            by_lookup, len(documents), None, seq_len, seq_len, device="cpu", BLOCK_SIZE=block_size
        )
        # dense blocks: visible blocks, and blocks that need no mask
        assert torch.equal(mask.to_dense(), wanted.to_dense())
        assert torch.equal(mask.full_kv_num_blocks, wanted.full_kv_num_blocks)
        q_idx, kv_idx = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
        for row in range(len(documents)):
            assert torch.equal(mask.mask_mod(row, 0, q_idx, kv_idx), allowed[row])


def test_mask_without_boundaries_gives_the_same_under_a_window():
    ids = ids_of([30, 1, 50])
    inputs = tensors(*ids.shape, 4, 2)
    mask = DocumentMask.from_documents(ids).with_window(9)
    by_document, by_mask = (
        attend(build_inner_attention("flex"), *inputs, one, return_lse=True)
        for one in (mask, mask.block_mask(block_size=16))
    )
    for got, want in zip(by_mask, by_document, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_window_below_one_and_kernels_that_cannot_are_refused():
    ids = ids_of([4])
    inputs = tensors(1, 4, 2, 2)
    with pytest.raises(ValueError, match="holds at least the query itself, got window_size=0"):
        DocumentMask.from_documents(ids).with_window(0)
    for request in ({"window": 2}, {"return_lse": True}):
        with pytest.raises(ValueError, match="set model.attn_type to 'flex' or 'varlen'"):
            attend(build_inner_attention("sdpa"), *inputs, None, **request)


@pytest.mark.parametrize("window", [None, 40, 200, 1000])
@pytest.mark.parametrize("n_heads, n_kv_heads", [(2, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_long_documents_equal_dense_attention(window, n_heads, n_kv_heads, return_lse):
    ids = ids_of([700, 1, 3], [150, 500, 54])
    check_long_documents(tensors(2, 704, n_heads, n_kv_heads, 8, 4), ids, window, return_lse)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0, 3000.0])
def test_large_scores_of_either_sign_neither_overflow_nor_vanish(size):
    q, k, v = tensors(1, 300, 2, 2)
    with torch.no_grad():
        q *= size**0.5
        k *= size**0.5
        k[:, :, 200:] = -q[
            :, :, 200:
        ]  # these score themselves lowest, and other tokens far from the bound
        q[:, 1, :10] = 0
    # The last bit of a score of 3,000 is 2e-4, and products round it in another order on each CPU.
    digits = max(2e-5, size * 1e-6)
    check_long_documents([q, k, v], ids_of([300]), None, True, digits)


def check_long_documents(inputs, ids, window, return_lse, digits=2e-5):
    mask = DocumentMask.from_documents(ids).lower("varlen")
    attention = build_inner_attention("varlen")
    results = attend(attention, *inputs, mask, 0.3, window, return_lse)
    out, lse = results if return_lse else (results, None)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, wanted_lse = dense(*exact, allowed_pairs(ids, window), 0.3)
    generator = torch.Generator().manual_seed(1)
    grads = (
        torch.randn(out.shape, generator=generator),
        torch.randn(lse.shape if return_lse else ()),
    )
    loss, wanted_loss = (out * grads[0]).sum(), (wanted.transpose(1, 2) * grads[0]).sum()
    torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=0, atol=digits)
    if return_lse:
        torch.testing.assert_close(lse.double(), wanted_lse.transpose(1, 2), rtol=1e-6, atol=digits)
        loss = loss + (lse * grads[1]).sum()
        wanted_loss = wanted_loss + (wanted_lse.transpose(1, 2) * grads[1]).sum()
    found = torch.autograd.grad(loss, inputs)
    for gradient, expected in zip(found, torch.autograd.grad(wanted_loss, exact), strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=2 * digits * largest)


@pytest.mark.parametrize("n_heads, n_kv_heads", [(4, 4), (4, 2)])
def test_causal_rows_equal_torchs_kernel(n_heads, n_kv_heads):
    inputs = tensors(3, 260, n_heads, n_kv_heads, 16, 16)
    out = build_inner_attention("sdpa")(*inputs, enable_gqa=n_heads != n_kv_heads)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=n_heads != n_kv_heads
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, expected = (torch.autograd.grad((x * factors).sum(), inputs) for x in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
