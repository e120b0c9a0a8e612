"""torch's compiled kernels under our masks, against attention written out densely in float64.

Tolerance: the kernels multiply in bf16, which keeps 8 bits, 4e-3 relative per rounding; outputs
are of order 1, gradients up to 10.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from tests.gpu.waits import counting_waits, num_graphs
from torchtitan.batch.documents import document_starts
from torchtitan.batch.mask import DocumentMask
from torchtitan.models.attention import (
    attend,
    build_inner_attention,
    create_attention_mask,
    get_document_mask_mod,
    get_sliding_window_mask_mod,
)

BF16 = {"rtol": 2e-2, "atol": 3e-2}
LAYOUTS = [[200, 312], [1] * 512, [512], [5, 130, 377], [128] * 4, [300, 1, 1, 210]]


def ids_of(*rows):
    """Document ids [B, T] of rows given by lengths; a negative length is padding."""
    ids = [
        [i if length > 0 else -1 for i, length in enumerate(lengths) for _ in range(abs(length))]
        for lengths in rows
    ]
    return torch.tensor(ids, dtype=torch.int32, device="cuda")


def tensors(n_rows, seq_len, n_heads, n_kv_heads, head_dim=64, value_dim=64):
    generator = torch.Generator().manual_seed(0)
    sizes = (n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, value_dim)
    values = (torch.randn(n_rows, seq_len, *size, generator=generator) for size in sizes)
    return tuple(x.to("cuda", torch.bfloat16).transpose(1, 2).requires_grad_() for x in values)


def dense(q, k, v, allowed):
    """Output [B, T, H, D] in float64."""
    n_rep = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(n_rep, dim=1) for x in (k, v))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v.double()).transpose(1, 2)


def allowed_pairs(document_ids):
    starts = document_starts(document_ids)
    keys = torch.arange(document_ids.shape[1], device="cuda")
    return ((keys >= starts[..., None]) & (keys <= keys[:, None]))[:, None]


def assert_same(actual, expected, inputs):
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).cuda()
    torch.testing.assert_close(actual.double(), expected, **BF16)
    ours = torch.autograd.grad(actual, inputs, grad.to(actual.dtype))
    theirs = torch.autograd.grad(expected, inputs, grad.double())
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want.double(), **BF16)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (4, 4, 192, 128)])
@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_rows_agree_with_dense_attention_forward_and_backward(attn_type, heads):
    """heads: numbers of query and key heads; in the last case values are smaller than keys."""
    ids = ids_of([200, 1, 100, -50, 161], [512])
    inputs = tensors(2, 512, *heads)
    out = attend(build_inner_attention(attn_type), *inputs, DocumentMask.from_documents(ids))
    assert_same(out, dense(*inputs, allowed_pairs(ids)), inputs)


def test_document_mask_composes_with_a_sliding_window():
    ids = ids_of([200, 312])
    mask_mod = and_masks(get_document_mask_mod(document_ids=ids), get_sliding_window_mask_mod(40))
    mask = create_attention_mask(mask_mod, 1, None, 512, 512, device="cuda")
    inputs = tensors(1, 512, 4, 2)
    out = attend(build_inner_attention("flex"), *inputs, mask)
    columns = torch.arange(512, device="cuda")
    near = columns[:, None] - columns < 40
    assert_same(out, dense(*inputs, allowed_pairs(ids) & near), inputs)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_changing_layouts_neither_recompile_nor_wait_for_the_device(attn_type):
    """After warm-up; varlen reads its sizes back once per batch, when the mask is made."""
    inner, inputs = build_inner_attention(attn_type), tensors(1, 512, 4, 2)

    def train(lengths):
        with counting_waits() as waits:
            mask = DocumentMask.from_documents(ids_of_on_device[tuple(lengths)])
            out = attend(inner, *inputs, mask)
            torch.autograd.grad(out, inputs, out.detach())
        return sum(waits.values())

    ids_of_on_device = {tuple(lengths): ids_of(lengths) for lengths in LAYOUTS}
    for lengths in LAYOUTS[:3]:
        train(lengths)
    before = num_graphs()
    n_waits = [train(lengths) for lengths in LAYOUTS[3:]]
    assert num_graphs() == before
    assert max(n_waits) <= (1 if attn_type == "varlen" else 0)


def test_mask_of_every_other_length_compiles_nothing_after_warm_up():
    """A new closure, which holds a new tensor, and a new length per call, as clients have them."""
    counts = []
    for seq_len in range(300, 780, 40):
        mask_mod = and_masks(
            get_document_mask_mod(document_ids=ids_of([100, seq_len - 100])),
            get_sliding_window_mask_mod(40),
        )
        mask = create_attention_mask(mask_mod, 1, None, seq_len, seq_len, device="cuda")
        assert mask.shape == (1, 1, seq_len, seq_len)
        counts.append(num_graphs())
    assert counts[2:] == [counts[2]] * 10
