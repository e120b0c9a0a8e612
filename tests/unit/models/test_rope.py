"""Edges of RoPE tables, and their application against rotations by hand.

`tests/reference/test_families_transformers.py` compares every kind of table.
"""

import math

import pytest
import torch

from torchtitan.models.rope import (
    LongRoPE,
    RoPEArgs,
    RoPEScalingArgs,
    YaRNArgs,
    apply_rotary_emb,
    precompute_freqs_cis,
    select_positions,
    yarn_mscale,
)


def test_scaling_with_equal_bounds_is_a_step():
    scaling = RoPEScalingArgs(16.0, 1.0, 1.0, 8192)
    angles = precompute_freqs_cis(128, 2, 500000, scaling)[1].angle()
    known = torch.tensor([1.0, 0.8146172166, 0.0009384739, 4.77811e-05, 3.89233e-05, 1.534e-07])
    torch.testing.assert_close(angles[[0, 1, 34, 35, 36, 63]], known, rtol=1e-3, atol=0)


def test_yarn_bounds_that_coincide_are_a_step():
    # Within 2 tokens no pair turns even once: every pair but the first, at the bound, is slowed.
    plain, yarn = (
        precompute_freqs_cis(16, 2, 10000, scaling)[1].angle()
        for scaling in (None, YaRNArgs(8, 2, 1, 1))
    )
    torch.testing.assert_close(plain / yarn, torch.tensor([1.0] + [8.0] * 7))


def test_yarn_corrects_magnitude_only_where_it_stretches():
    assert yarn_mscale(1.0) == yarn_mscale(0.5, 0.7) == 1.0
    assert yarn_mscale(math.e**10, 0.7) == pytest.approx(1.7)


def rotate_by_hand(x, table, positions):
    """x: [B, T, heads, D]. Turn each pair (2i, 2i + 1) by the angle of its position."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for i in range(x.shape[3] // 2):
                angle = table[positions[b][t], i].angle().item()
                a, c = x[b, t, :, 2 * i], x[b, t, :, 2 * i + 1]
                out[b, t, :, 2 * i] = a * math.cos(angle) - c * math.sin(angle)
                out[b, t, :, 2 * i + 1] = a * math.sin(angle) + c * math.cos(angle)
    return out


@pytest.mark.parametrize(
    "positions, rows",
    [(None, [[0, 1, 2]] * 2), ([[2, 0, 1]], [[2, 0, 1]] * 2), ([[4, 5, 0], [1, 2, 3]],) * 2],
)
def test_each_token_turns_by_its_own_position(positions, rows):
    torch.manual_seed(0)
    table = precompute_freqs_cis(8, 6)
    xq, xk = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    given = None if positions is None else torch.tensor(positions)
    out_q, out_k = apply_rotary_emb(xq, xk, table, given)
    torch.testing.assert_close(out_q, rotate_by_hand(xq, table, rows))
    torch.testing.assert_close(out_k, rotate_by_hand(xk, table, rows))


def test_position_beyond_the_table_names_the_length_it_needs():
    positions = torch.tensor([[0, 1, 9]])
    with pytest.raises(ValueError, match="holds 4 positions and the batch needs 10"):
        select_positions(precompute_freqs_cis(8, 4), positions, 3)


def test_long_packed_row_needs_only_its_longest_document():
    positions = torch.arange(4).repeat(3)[None]
    assert select_positions(precompute_freqs_cis(8, 4), positions, 12).shape == (1, 12, 4)


def test_padding_positions_read_some_row_of_the_table():
    positions = torch.tensor([[-1, 0, 1]])
    table = precompute_freqs_cis(8, 4)
    assert torch.equal(select_positions(table, positions, 3)[0], table[[0, 0, 1]])


def test_longrope_takes_the_short_factors_for_a_short_model():
    scaling = LongRoPE((1.0,) * 6, (2.0,) * 6, original_seq_len=64)
    plain, scaled = RoPEArgs(share=0.75), RoPEArgs(share=0.75, scaling=scaling)
    for length in (64, 65):  # a longer row of one batch changes no frequency
        tables = [rope.table(16, length, 5e4, max_seq_len=64) for rope in (plain, scaled)]
        assert torch.equal(*tables)
