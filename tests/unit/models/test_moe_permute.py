"""Regrouping tokens by expert."""

from collections import Counter

import pytest
import torch

from tests.unit.models.tiny import Operators
from torchtitan.distributed.token_groups import take_rows
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe import utils
from torchtitan.models.moe.kernels import generate_permute_indices


@pytest.fixture(autouse=True)
def default_alignment():
    yield
    utils.set_token_group_alignment_size_m(8)


def test_known_places_of_two_ranks_and_four_experts():
    counts = torch.tensor([4, 2, 1, 3, 1, 2, 3, 4])
    indices, sizes, ends = generate_permute_indices(counts, 4, 2, 64, 8)
    expected = [
        *([0, 1, 2, 3, 10] + [-1] * 3),
        *([4, 5, 11, 12] + [-1] * 4),
        *([6, 13, 14, 15] + [-1] * 4),
        *[7, 8, 9, 16, 17, 18, 19, -1],
        *[-1] * 32,
    ]
    assert indices.tolist() == expected
    assert sizes.tolist() == [8] * 4 and ends.tolist() == [8, 16, 24, 32]
    assert {t.dtype for t in (indices, sizes, ends)} == {torch.int32}


@pytest.mark.parametrize("alignment", [8, 16, 32])
def test_permuted_and_back_is_the_same(alignment):
    utils.set_token_group_alignment_size_m(alignment)
    counts = torch.tensor([4, 0, 2, 3, 1, 0, 0, 5])
    x = torch.randn(15, 6)
    shape, permuted, indices, padded = utils._permute(x, counts, 2, 4)
    assert shape == (16, 6) and padded.tolist() == [alignment] * 4
    assert permuted.shape[0] % alignment == 0 and permuted.shape[0] >= 15 + 4 * alignment
    assert torch.equal(permuted[indices < 0], torch.zeros(int((indices < 0).sum()), 6))
    assert torch.equal(utils._unpermute(permuted, shape, indices), x)


def test_padded_experts_equal_unpadded_ones_with_gradients():
    torch.manual_seed(0)
    inputs = [torch.randn(4, 24, 16), torch.randn(4, 16, 24), torch.randn(4, 24, 16)]
    inputs = [t / 4 for t in inputs] + [torch.randn(17, 16)]
    run = moe_module._run_experts_grouped_mm
    results = []
    for function in (run, utils.indices_padding_wrapper(run)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves, torch.tensor([9, 0, 1, 7]))
        out.sin().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def test_rows_are_gathered_in_forward_and_backward_and_never_added_by_index(monkeypatch):
    monkeypatch.setattr(moe_module, "_needs_padding", lambda parameter: True)
    torch.manual_seed(0)
    moe = moe_module.MoE(moe_module.MoEArgs(num_experts=4, top_k=2, num_shared_experts=0), 32, 48)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 9, 32, requires_grad=True)
    with Operators() as operators:
        moe(x).square().sum().backward()
    on_rows = Counter(op.name() for op, shape in operators.calls if shape and shape[1:] == (32,))
    # To the experts' order, to padded slots, and both back; the same in backward.
    assert on_rows["aten::index_select"] == 8
    for name in ("index_add", "index_add_", "index_copy", "index_put", "_index_put_impl_", "cat"):
        assert not on_rows[f"aten::{name}"], name


def test_row_without_a_place_gets_zeros_and_no_gradient():
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    rows = torch.tensor([2, -1, 0, 2])
    places = torch.tensor([[2, -1], [-1, -1], [0, 3]])
    out = take_rows(x, rows, places, rows_have_gaps=True, places_have_gaps=True)
    assert out.tolist() == [[4, 5], [0, 0], [0, 1], [4, 5]]
    (grad,) = torch.autograd.grad(out, x, torch.ones(4, 2))
    assert grad.tolist() == [[1, 1], [0, 0], [2, 2]]
    nothing = take_rows(x[:0], torch.tensor([-1, -1]), places[:0], rows_have_gaps=True)
    assert nothing.tolist() == [[0, 0], [0, 0]]
