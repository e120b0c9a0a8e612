"""Every kernel against attention written out densely in float64, on the CPU.

Tolerance: outputs and gradients are of order 1 and sums have at most 40 terms, so fp32 results
are good to a few 1e-6.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from torchtitan.batch.documents import document_ids_from_positions
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


def tensors(n_rows, seq_len, n_heads, n_kv_heads, head_dim=8, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, value_dim or head_dim)]
    return tuple(
        torch.randn(n_rows, seq_len, heads, size, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for heads, size in shapes
    )


def dense(q, k, v, allowed, scale=None):
    """Softmax over allowed pairs, step by step; zeros for a query that sees nothing.

    q: [B, H, T, D]; k, v: [B, K, T, D]; allowed: bool, broadcastable to [B, H, T, T].
    """
    n_rep = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(n_rep, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * scale
    weights = torch.where(allowed, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)) @ v.double()


def allowed_pairs(document_ids):
    """bool [B, 1, T, T]: causal, within a run of equal ids; padding sees only itself."""
    n_rows, seq_len = document_ids.shape
    allowed = torch.zeros(n_rows, 1, seq_len, seq_len, dtype=torch.bool)
    for row, ids in enumerate(document_ids.tolist()):
        for q in range(seq_len):
            key = q
            while key >= 0 and ids[key] == ids[q] and (key == q or ids[q] >= 0):
                allowed[row, 0, q, key] = True
                key -= 1
    return allowed


def varlen_metadata(document_ids):
    return DocumentMask.from_documents(document_ids).lower("varlen").lowered


def assert_same(actual, expected, inputs, **tolerance):
    """Outputs and the gradients of all inputs agree."""
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(actual.double(), expected.double(), **tolerance)
    actual_grads = torch.autograd.grad(actual, inputs, grad.to(actual.dtype), retain_graph=True)
    expected_grads = torch.autograd.grad(
        expected, inputs, grad.to(expected.dtype), retain_graph=True
    )
    for got, want in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(got.double(), want.double(), **tolerance)


@st.composite
def packings(draw):
    """Ids [B, T] with single tokens and padding anywhere."""
    seq_len = draw(st.integers(1, 40))
    n_rows = draw(st.integers(1, 3))
    rows = []
    for _ in range(n_rows):
        row, document = [], 0
        while len(row) < seq_len:
            length = draw(st.integers(1, 12))
            is_padding = draw(st.integers(0, 3)) == 0
            row += [-1 if is_padding else document] * length
            document += not is_padding
        rows.append(row[:seq_len])
    return torch.tensor(rows, dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(packings(), st.sampled_from([4, 16]))
def test_block_mask_from_boundaries_equals_the_evaluated_one(document_ids, block_size):
    allowed = allowed_pairs(document_ids)[:, 0]
    n_rows, seq_len = document_ids.shape

    def by_lookup(b, h, q_idx, kv_idx):
        return allowed[b, q_idx, kv_idx]

    wanted = create_block_mask(
        by_lookup, n_rows, None, seq_len, seq_len, device="cpu", BLOCK_SIZE=block_size
    )
    mask = DocumentMask.from_documents(document_ids).block_mask(block_size)
    assert mask.shape == wanted.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(mask, f"{kind}_num_blocks")
        assert torch.equal(counts, getattr(wanted, f"{kind}_num_blocks")), kind
        indices, wanted_indices = (getattr(m, f"{kind}_indices") for m in (mask, wanted))
        for place in (counts > 0).nonzero().tolist():
            n = counts[tuple(place)]
            assert set(indices[tuple(place)][:n].tolist()) == set(
                wanted_indices[tuple(place)][:n].tolist()
            )
    q_idx, kv_idx = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    for row in range(n_rows):
        assert torch.equal(mask.mask_mod(row, 0, q_idx, kv_idx), allowed[row])


def lookup(mask_mod, n_rows, seq_len):
    """The mask function evaluated for every pair: bool [B, 1, T, T]."""
    pairs = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    return torch.stack([mask_mod(torch.tensor(b), 0, *pairs) for b in range(n_rows)])[:, None]


# Boundaries from positions that start anywhere, and an image in tokens 3 to 5 of row 0's second
# document, inside of which tokens see each other both ways.
POSITIONS = torch.tensor([[7, 8, 0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
IMAGES = torch.tensor([[-1, -1, -1, 0, 0, 0, -1, -1, -1, -1], [-1] * 10])


def document_compositions():
    documents = get_document_mask_mod(positions=POSITIONS)
    causal = get_causal_mask_mod()

    def image(b, h, q_idx, kv_idx):
        return (IMAGES[b, q_idx] == IMAGES[b, kv_idx]) & (IMAGES[b, q_idx] >= 0)

    return {
        "causal": and_masks(causal, documents),
        "sliding window": and_masks(get_sliding_window_mask_mod(3), documents),
        "chunks": and_masks(causal, documents, get_fixed_block_mask_mod(4)),
        "image": and_masks(or_masks(causal, image), documents),
    }


@pytest.mark.parametrize("name", document_compositions())
def test_document_masks_compose_with_other_masks(name):
    """Against a loop over pairs, output and gradients; no pair of two documents is ever seen."""
    mask = create_attention_mask(
        document_compositions()[name], 2, None, 10, 10, device="cpu", BLOCK_SIZE=4
    )
    allowed = torch.zeros(2, 1, 10, 10, dtype=torch.bool)
    for row in range(2):
        documents = document_ids_from_positions(POSITIONS)[row].tolist()
        images = IMAGES[row].tolist()
        for q in range(10):
            for k in range(10):
                seen = {
                    "causal": k <= q,
                    "sliding window": 0 <= q - k < 3,
                    "chunks": k <= q and q // 4 == k // 4,
                    "image": k <= q or images[q] == images[k] == 0,
                }[name]
                allowed[row, 0, q, k] = seen and documents[q] == documents[k]
    inputs = tensors(2, 10, 4, 2)
    out = FlexAttentionWrapper()(*inputs, block_mask=mask, enable_gqa=True)
    assert_same(out, dense(*inputs, allowed), inputs, **FP32)


def test_score_mod_changes_the_scores():
    def bias(score, b, h, q_idx, kv_idx):
        return score + 0.1 * (kv_idx - q_idx) * (h + 1)

    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = DocumentMask.from_documents(ids).block_mask(block_size=4)
    inputs = tensors(1, 6, 2, 2)
    out = FlexAttentionWrapper()(*inputs, score_mod=bias, block_mask=mask)
    q, k, v = (x.double() for x in inputs)
    distance = torch.arange(6)[None] - torch.arange(6)[:, None]
    scores = q @ k.mT / 8**0.5 + 0.1 * distance * torch.tensor([1, 2])[:, None, None]
    weights = scores.masked_fill(~allowed_pairs(ids), float("-inf")).softmax(-1)
    assert_same(out, weights @ v, inputs, **FP32)


@pytest.mark.parametrize("attn_type", ["flex", "varlen", "sdpa"])
def test_values_may_have_another_head_size(attn_type):
    ids = torch.zeros(2, 7, dtype=torch.int32)
    mask = None if attn_type == "sdpa" else DocumentMask.from_documents(ids)
    inputs = tensors(2, 7, 4, 2, head_dim=12, value_dim=8)
    out = attend(build_inner_attention(attn_type), *inputs, mask)
    assert out.shape == (2, 7, 4, 8)
    expected = dense(*inputs, torch.ones(7, 7).tril().bool()).transpose(1, 2)
    assert_same(out, expected, inputs, **FP32)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_bf16_differs_from_fp32_by_its_own_rounding(attn_type):
    ids = torch.tensor([[0] * 20 + [1] * 11 + [-1]])
    inputs = [x.detach().bfloat16().requires_grad_() for x in tensors(1, 32, 4, 2)]
    out = attend(build_inner_attention(attn_type), *inputs, DocumentMask.from_documents(ids))
    assert out.dtype == torch.bfloat16
    expected = dense(*inputs, allowed_pairs(ids)).transpose(1, 2)
    # bf16 keeps 8 bits: 4e-3 relative per rounding, a few of them.
    assert_same(out, expected, inputs, rtol=2e-2, atol=3e-2)


def test_varlen_metadata_has_the_known_boundaries():
    batch = torch.tensor([[5, 5, 2, 5, 5, 2], [5, 5, 5, 5, 2, 5]])
    metadata = create_varlen_metadata_for_document(batch, EOS)
    assert metadata.cu_seq_q.tolist() == [0, 3, 6, 11, 12]
    assert metadata.cu_seq_q.dtype == torch.int32
    assert metadata.cu_seq_k is metadata.cu_seq_q
    assert (metadata.max_q, metadata.max_k) == (5, 5)


def test_mask_of_another_batch_names_both_sizes():
    metadata = varlen_metadata(torch.zeros(1, 6, dtype=torch.int32))
    with pytest.raises(ValueError, match="cover 6 tokens and the batch has 5"):
        VarlenAttentionWrapper()(*tensors(1, 5, 2, 2), metadata)


def test_sdpa_is_causal():
    inputs = tensors(2, 9, 4, 2)
    out = ScaledDotProductAttentionWrapper()(*inputs, enable_gqa=True)
    assert_same(out, dense(*inputs, torch.ones(9, 9).tril().bool()), inputs, **FP32)


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
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **kwargs: calls.append((k, v, kwargs)) or sdpa(q, k, v, **kwargs),
    )
    on_cpu = [x.detach().to(dtype) for x in tensors(1, 6, 4, 2)]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril() if has_mask else None
    # "meta" stands for the accelerator; on the CPU one kernel serves every mask.
    for device in ("cpu", "meta"):
        inputs = [x.to(device) for x in on_cpu]
        options = {"attn_mask": None if mask is None else mask.to(device), "enable_gqa": True}
        out = ScaledDotProductAttentionWrapper()(*inputs, **options)
        assert out.shape == (1, 4, 6, 8)
    assert [kwargs["enable_gqa"] for *_, kwargs in calls] == [True, False]
    assert [k.shape[1] for k, *_ in calls] == [v.shape[1] for _, v, _ in calls] == [2, 4]


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


def test_document_mask_mod_keeps_an_eos_in_the_document_it_closes():
    batch = torch.tensor([[5, 5, 2, 5, 5, 2], [5, 5, 5, 5, 2, 5]])
    before = batch.clone()
    pairs = lookup(get_document_mask_mod(batch, EOS), 2, 6)[:, 0]
    one = torch.ones(3, 3, dtype=torch.bool)
    assert torch.equal(pairs[0], torch.block_diag(one, one).bool())
    five = torch.ones(5, 5, dtype=torch.bool)
    assert torch.equal(pairs[1], torch.block_diag(five, torch.ones(1, 1)).bool())
    assert torch.equal(batch, before)


def test_document_mask_mod_takes_ids_or_positions_and_shows_padding_to_itself_alone():
    ids, positions = torch.tensor([[0, 0, -1, -1, 0]]), torch.tensor([[0, 1, -1, -1, 0]])
    one = torch.ones(1, 1)
    expected = torch.block_diag(torch.ones(2, 2), one, one, one).bool()
    for separator in ({"document_ids": ids}, {"positions": positions}):
        assert torch.equal(lookup(get_document_mask_mod(**separator), 1, 5)[0, 0], expected)
        one_row = {name: x[0] for name, x in separator.items()}
        assert torch.equal(lookup(get_document_mask_mod(**one_row), 1, 5)[0, 0], expected)


@pytest.mark.parametrize("given", [{}, {"batch": torch.ones(1, 2).long()}, {"eos_id": EOS}])
def test_document_mask_mod_without_a_separator_is_refused(given):
    got = "input" if "batch" in given else "none of them"
    with pytest.raises(ValueError, match=f"or tokens .* with eos_id, got {got}; give one"):
        get_document_mask_mod(**given)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_changing_documents_do_not_recompile_after_warm_up(attn_type):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    inputs = tensors(1, 24, 2, 2)
    inner = build_inner_attention(attn_type)
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    n_compiled = []
    for lengths in ([10, 14], [5, 5, 14], [24], [3, 3, 3, 15], [1] * 24, [20, 4]):
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        mask = DocumentMask.from_documents(ids).lower(attn_type)
        out = compiled(inner, *inputs, mask)
        torch.testing.assert_close(
            out.double(), dense(*inputs, allowed_pairs(ids)).transpose(1, 2), **FP32
        )
        torch.autograd.grad(out.sum(), inputs)
        n_compiled.append(counter.frame_count)
    assert n_compiled[1:] == [n_compiled[1]] * 5


@pytest.mark.parametrize(
    ("n_queries", "n_keys"),
    [
        ([128, 128] * 2, [128, 512] * 2),
        ([256, 256], [384, 384]),
        ([3, 100, 7], [5, 400, 7]),
        ([0, 1, 2, 0], [1, 1, 2, 3]),
    ],
)
def test_queries_with_more_keys_than_queries_equal_dense_attention(n_queries, n_keys):
    """Documents as context parallelism cuts them: the last query sees the last key."""
    from torchtitan.models.attention_cpu import document_attention

    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (n_queries, n_keys))
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (cu_q[-1], cu_k[-1], cu_k[-1]))
    document_q, place_q, document_k, place_k = (
        part
        for cu in (cu_q, cu_k)
        for document in [torch.bucketize(torch.arange(int(cu[-1])), cu[1:], right=True)]
        for part in (document, torch.arange(int(cu[-1])) - cu[1:][document])
    )
    seen = (document_q[:, None] == document_k) & (place_q[:, None] >= place_k)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 8**-0.5
    expected = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    out, _ = document_attention(q, k, v, cu_q, cu_k, 8**-0.5, None)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads, expected_grads = (torch.autograd.grad(o, (q, k, v), weights) for o in (out, expected))
    # The 512 products are summed in another order.
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-5)


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
