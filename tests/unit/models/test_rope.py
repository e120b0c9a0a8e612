"""Edges of RoPE tables.

`tests/reference/test_families_transformers.py` compares every kind of table, and its application.
"""

import math

import pytest
import torch

from torchtitan.models.rope import (
    LongRoPE,
    RoPEArgs,
    RoPEScalingArgs,
    YaRNArgs,
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


def test_position_beyond_the_table_names_the_length_it_needs():
    positions = torch.tensor([[0, 1, 9]])
    with pytest.raises(ValueError, match="holds 4 positions and the batch needs 10"):
        select_positions(precompute_freqs_cis(8, 4), positions, 3)


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
