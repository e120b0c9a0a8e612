"""Every kernel against attention written out densely in float64, on the CPU.

Tolerance: outputs and gradients are of order 1 and sums have at most 40 terms, so fp32 results
are good to a few 1e-6.
"""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from torchtitan.batch.documents import PADDING, document_ids_from_positions
from torchtitan.batch.mask import DocumentMask
from torchtitan.models import attention
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    ScaledDotProductAttentionWrapper,
    VarlenAttentionWrapper,
    attend,
    build_inner_attention,
    choose_kernel_options,
    create_attention_mask,
    create_varlen_metadata_for_document,
    get_causal_mask_mod,
    get_document_mask_mod,
    get_fixed_block_mask_mod,
    get_sliding_window_mask_mod,
)

FP32 = {"rtol": 1e-5, "atol": 5e-6}
EOS = 2


def tensors(n_rows, seq_len, n_heads, n_kv_heads, head_dim=8, value_dim=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, value_dim or head_dim)]
    return [
        torch.randn(n_rows, heads, seq_len, size, generator=generator).to(dtype).requires_grad_()
        for heads, size in shapes
    ]


def dense(q, k, v, allowed, scale=None, bias=0):
    """(output [B, H, T, Dv], log-sum-exp [B, H, T]) in float64; allowed: bool [B or 1, 1 or H, T, T]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def allowed_pairs(document_ids, window=None):
    """bool [B, 1, T, T]: causal, within a document and the window; padding sees only itself."""
    columns = torch.arange(document_ids.shape[1])
    distance = columns[:, None] - columns
    same = (document_ids[:, :, None] == document_ids[:, None]) & (document_ids != PADDING)[:, None]
    allowed = (same & (distance >= 0)) | (distance == 0)
    return (allowed if window is None else allowed & (distance < window))[:, None]


def ids_of(*rows):
    """Document ids from lengths; a negative length is padding."""
    return torch.tensor(
        [
            [PADDING if n < 0 else i for i, n in enumerate(row) for _ in range(abs(n))]
            for row in rows
        ]
    )


def assert_same(actual, expected, inputs, **tolerance):
    """Outputs, which are tensors or tuples of them, and the gradients of all inputs agree."""
    generator, results = torch.Generator().manual_seed(1), []
    actual, expected = ([x] if isinstance(x, torch.Tensor) else [*x] for x in (actual, expected))
    factors = [torch.randn(x.shape, generator=generator) for x in expected]
    for outputs in (actual, expected):
        grads = [factor.to(x.dtype) for factor, x in zip(factors, outputs, strict=True)]
        found = torch.autograd.grad(
            outputs, inputs, grads, retain_graph=True, materialize_grads=True
        )
        results.append([x.double() for x in (*outputs, *found)])
    torch.testing.assert_close(*results, **tolerance)


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


@settings(max_examples=40, deadline=None)
@given(packings(), st.sampled_from([4, 16]), st.sampled_from([None, 1, 3, 16, 50]))
def test_block_mask_from_boundaries_equals_the_evaluated_one(ids, block_size, window):
    n_rows, seq_len = ids.shape
    whole_rows = DocumentMask.from_rows(n_rows, seq_len, ids.device).with_window(window)
    for documents, mask in (
        (ids, DocumentMask.from_documents(ids).with_window(window)),
        (ids[:1] * 0, whole_rows),
    ):
        mask = mask.block_mask(block_size)
        allowed = allowed_pairs(documents, window)[:, 0]

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


def lookup(mask_mod, n_rows, seq_len):
    """The mask function evaluated for every pair: bool [B, 1, T, T]."""
    pairs = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    return torch.stack([mask_mod(torch.tensor(b), 0, *pairs) for b in range(n_rows)])[:, None]


# Boundaries from positions that start anywhere, and an image in tokens 3 to 5 of row 0's second
# document, inside of which tokens see each other both ways.
POSITIONS = torch.tensor([[7, 8, 0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
IMAGES = torch.tensor([[-1, -1, -1, 0, 0, 0, -1, -1, -1, -1], [-1] * 10])


def image(b, h, q_idx, kv_idx):
    return (IMAGES[b, q_idx] == IMAGES[b, kv_idx]) & (IMAGES[b, q_idx] >= 0)


# name -> mask without documents, and the same rule for one pair
COMPOSED = {
    "causal": (get_causal_mask_mod(), lambda row, q, k: k <= q),
    "sliding window": (get_sliding_window_mask_mod(3), lambda row, q, k: 0 <= q - k < 3),
    "chunks": (
        and_masks(get_causal_mask_mod(), get_fixed_block_mask_mod(4)),
        lambda row, q, k: k <= q and q // 4 == k // 4,
    ),
    "image": (
        or_masks(get_causal_mask_mod(), image),
        lambda row, q, k: k <= q or (row == 0 and {q, k} <= {3, 4, 5}),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_document_masks_compose_with_other_masks(name):
    """Against a loop over pairs, output and gradients; no pair of two documents is ever seen."""
    mask_mod, is_seen = COMPOSED[name]
    mask_mod = and_masks(mask_mod, get_document_mask_mod(positions=POSITIONS))
    mask = create_attention_mask(mask_mod, 2, None, 10, 10, device="cpu", BLOCK_SIZE=4)
    allowed = torch.zeros(2, 1, 10, 10, dtype=torch.bool)
    documents = document_ids_from_positions(POSITIONS).tolist()
    for row, q, k in itertools.product(range(2), range(10), range(10)):
        allowed[row, 0, q, k] = is_seen(row, q, k) and documents[row][q] == documents[row][k]
    inputs = tensors(2, 10, 4, 2)
    out = FlexAttentionWrapper()(*inputs, block_mask=mask, enable_gqa=True)
    assert_same(out, dense(*inputs, allowed)[0], inputs, **FP32)


def test_score_mod_changes_the_scores():
    def bias(score, b, h, q_idx, kv_idx):
        return score + 0.1 * (kv_idx - q_idx) * (h + 1)

    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = DocumentMask.from_documents(ids).block_mask(block_size=4)
    inputs = tensors(1, 6, 2, 2)
    out = FlexAttentionWrapper()(*inputs, score_mod=bias, block_mask=mask)
    distance = torch.arange(6)[None] - torch.arange(6)[:, None]
    biases = 0.1 * distance * torch.tensor([1, 2])[:, None, None]
    assert_same(out, dense(*inputs, allowed_pairs(ids), bias=biases)[0], inputs, **FP32)


def test_varlen_metadata_has_the_known_boundaries():
    batch = torch.tensor([[5, 5, 2, 5, 5, 2], [5, 5, 5, 5, 2, 5]])
    metadata = create_varlen_metadata_for_document(batch, EOS)
    assert metadata.cu_seq_q.tolist() == [0, 3, 6, 11, 12]
    assert metadata.cu_seq_q.dtype == torch.int32
    assert metadata.cu_seq_k is metadata.cu_seq_q
    assert (metadata.max_q, metadata.max_k) == (5, 5)


def test_mask_of_another_batch_names_both_sizes():
    metadata = DocumentMask.from_rows(1, 6, torch.device("cpu")).lower("varlen").lowered
    with pytest.raises(ValueError, match="cover 6 tokens and the batch has 5"):
        VarlenAttentionWrapper()(*tensors(1, 5, 2, 2), metadata)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_sdpa_compiles_where_the_numbers_of_heads_are_symbols(kv_heads):
    # The compiler turns sizes that change into symbols, as for the second model of a process.
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    inner = build_inner_attention("sdpa")
    inputs = tensors(1, 6, 4, kv_heads)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 1)
    expected = attend(inner, *inputs, None)
    torch.testing.assert_close(compiled(inner, *inputs, None), expected, **FP32)


@pytest.mark.parametrize("dtype, has_mask", [(torch.float32, False), (torch.bfloat16, True)])
def test_sdpa_groups_no_heads_where_only_the_memory_efficient_kernel_is_left(
    dtype, has_mask, monkeypatch
):
    sdpa = mock.Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    on_cpu = [x.detach().to(dtype) for x in tensors(1, 6, 4, 2)]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril() if has_mask else None
    # "meta" stands for the accelerator; on the CPU one kernel serves every mask.
    for device, n_kv_heads in (("cpu", 2), ("meta", 4)):
        inputs = [x.to(device) for x in on_cpu]
        options = {"attn_mask": None if mask is None else mask.to(device), "enable_gqa": True}
        out = ScaledDotProductAttentionWrapper()(*inputs, **options)
        assert out.shape == (1, 4, 6, 8)
        (_, k, v), options = sdpa.call_args
        assert options["enable_gqa"] == (device == "cpu")
        assert k.shape[1] == v.shape[1] == n_kv_heads


@pytest.mark.parametrize(
    "attn_type, mask, what",
    [
        ("flex", None, "a BlockMask, got NoneType"),
        ("varlen", None, "a VarlenMetadata, got NoneType"),
        ("sdpa", "varlen", "no attention_masks, got VarlenMetadata"),
        ("sdpa", "flex", "no attention_masks, got BlockMask"),
    ],
)
def test_wrong_kind_of_mask_is_named(attn_type, mask, what):
    if mask is not None:
        mask = DocumentMask.from_documents(torch.zeros(1, 4, dtype=torch.int32)).lower(mask).lowered
    with pytest.raises(TypeError, match=what):
        attend(build_inner_attention(attn_type), *tensors(1, 4, 2, 2), mask)


def test_document_mask_mod_takes_tokens_ids_or_positions_and_shows_padding_to_itself_alone():
    """An end-of-text token belongs to the document that it closes."""
    batch = torch.tensor([[5, 5, 2, 5, 5, 2], [5, 5, 5, 5, 2, 5]])
    before, tokens = batch.clone(), {"batch": batch, "eos_id": EOS}
    ids, positions = torch.tensor([[0, 0, -1, -1, 0]]), torch.tensor([[0, 1, -1, -1, 0]])
    for row, lengths, separators in (
        (0, [3, 3], tokens),
        (1, [5, 1], tokens),
        *((0, [2, 1, 1, 1], {"document_ids": x}) for x in (ids, ids[0])),
        *((0, [2, 1, 1, 1], {"positions": x}) for x in (positions, positions[0])),
    ):
        pairs = lookup(get_document_mask_mod(**separators), row + 1, sum(lengths))[row, 0]
        assert torch.equal(pairs, torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool())
    assert torch.equal(batch, before)


@pytest.mark.parametrize("given", [{}, {"batch": torch.ones(1, 2).long()}, {"eos_id": EOS}])
def test_document_mask_mod_without_a_separator_is_refused(given):
    got = "input" if "batch" in given else "none of them"
    with pytest.raises(ValueError, match=f"or tokens .* with eos_id, got {got}; give one"):
        get_document_mask_mod(**given)


@pytest.mark.parametrize("capability, dtype, is_set", [
    ((9, 0), torch.bfloat16, True), ((9, 0), torch.float32, False), ((8, 0), torch.bfloat16, False),
])  # fmt: skip
def test_flex_in_a_compiled_block_takes_the_options_of_its_card(
    capability, dtype, is_set, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    model = torch.nn.ModuleList([FlexAttentionWrapper()])
    choose_kernel_options(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    flex = mock.Mock()
    monkeypatch.setattr(attention, "load_flex_attention", lambda: flex)
    model[0](*(torch.empty(1, 2, 8, 128, dtype=dtype, device="meta") for _ in "qkv"))
    options = flex.flex_attention.call_args.kwargs.get("kernel_options")
    assert (options is not None and options["bwd_num_warps"] == 4) == is_set


# ---- windows, and gradients through the log-sum-exp of the scores ----


@settings(max_examples=25, deadline=None)
@given(packings(), st.sampled_from([(2, 2), (4, 1)]), st.sampled_from([None, 1, 2, 7, 64, 130]))
def test_window_and_log_sum_exp_with_gradients_equal_dense_attention(ids, heads, window):
    inputs = tensors(*ids.shape, *heads)
    expected = [x.transpose(1, 2) for x in dense(*inputs, allowed_pairs(ids, window), scale=0.5)]
    documents = DocumentMask.from_documents(ids)
    metadata = documents.lower("varlen").lowered  # which has no window
    for attn_type, mask, of_layer in (
        ("flex", documents.with_window(window), None),
        ("varlen", documents.with_window(window), None),
        ("varlen", metadata, window),
    ):
        wrapper = build_inner_attention(attn_type)
        results = attend(wrapper, *inputs, mask, 0.5, window=of_layer, return_lse=True)
        assert results[1].dtype == torch.float32
        # fp32 sums of up to 140 terms of order 1
        assert_same(results, expected, inputs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("used", [0, 1], ids=["output", "lse"])
def test_gradient_is_right_when_only_one_result_is_used(used):
    ids = ids_of([5, 1, 9, -2])
    inputs = tensors(*ids.shape, 4, 2, dtype=torch.float64)
    mask = DocumentMask.from_documents(ids).with_window(4)
    actual = attend(build_inner_attention("flex"), *inputs, mask, return_lse=True)[used]
    assert_same(actual, dense(*inputs, allowed_pairs(ids, 4))[used].transpose(1, 2), inputs)


def test_key_gradients_of_a_window_are_summed_before_they_are_rounded_to_bf16():
    ids = ids_of([300])
    inputs = tensors(1, 300, 2, 1, dtype=torch.bfloat16)
    mask = DocumentMask.from_documents(ids).with_window(200)
    out, lse = attend(build_inner_attention("varlen"), *inputs, mask, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = dense(*inputs, allowed_pairs(ids, 200))
    grad = torch.ones_like(out)
    (actual,) = torch.autograd.grad(out, inputs[2:], grad)
    (wanted,) = torch.autograd.grad(expected, inputs[2:], grad.transpose(1, 2).double())
    # Half a unit of bf16's last place, because only the result is rounded.
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=2**-8, atol=1e-4)


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


@pytest.mark.parametrize(
    "window, n_heads, n_kv_heads, return_lse",
    [(None, 2, 2, True), (40, 4, 1, False), (200, 6, 2, True), (1000, 4, 1, True)],
)
def test_long_documents_equal_dense_attention(window, n_heads, n_kv_heads, return_lse):
    ids = ids_of([700, 1, 3], [150, 500, 54])
    check_long_documents(tensors(2, 704, n_heads, n_kv_heads, 8, 4), ids, window, return_lse)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0, 3000.0])
def test_large_scores_of_either_sign_neither_overflow_nor_vanish(size):
    q, k, v = tensors(1, 300, 2, 2)
    with torch.no_grad():
        q *= size**0.5
        k *= size**0.5
        # These tokens score themselves lowest, and other tokens far from the bound.
        k[:, :, 200:] = -q[:, :, 200:]
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
    generator, pairs = torch.Generator().manual_seed(1), [(out, wanted), (lse, wanted_lse)]
    loss = wanted_loss = 0
    for ours, exact_one in pairs[: 1 + return_lse]:
        expected, factors = exact_one.transpose(1, 2), torch.randn(ours.shape, generator=generator)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=digits)
        loss, wanted_loss = loss + (ours * factors).sum(), wanted_loss + (expected * factors).sum()
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
    assert_same(out, wanted, inputs, rtol=1e-4, atol=1e-4)
