"""RoPE tables against published angles, and their application against rotations by hand."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchtitan.models.rope import (
    LinearRoPE,
    LongRoPE,
    RoPEArgs,
    RoPEScalingArgs,
    YaRNArgs,
    apply_rotary_emb,
    apply_rotary_emb_to_halves,
    precompute_freqs_cis,
    precompute_rope_cache,
    select_positions,
    yarn_mscale,
)


def test_llama3_table_has_the_known_angles():
    table = precompute_freqs_cis(128, 4, theta=500000)
    indices = [0, 1, 20, 28, 29, 30, 32, 35, 36, 40, 63]
    known = [1.0, 0.814617217, 0.016560443, 0.003211446, 0.002166571, 0.001371894, 0.000524846]
    known += [9.5562e-05, 7.7847e-05, 3.4281e-05, 3.07e-07]
    assert table.dtype == torch.complex64 and table.shape == (4, 64)
    # The last figures are given to four or five digits.
    torch.testing.assert_close(table[1].angle()[indices], torch.tensor(known), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        table[1].angle()[indices[:7]], torch.tensor(known[:7]), rtol=1e-6, atol=1e-9
    )


def test_scaling_with_equal_bounds_is_a_step():
    scaling = RoPEScalingArgs(16.0, 1.0, 1.0, 8192)
    angles = precompute_freqs_cis(128, 2, 500000, scaling)[1].angle()
    known = torch.tensor([1.0, 0.8146172166, 0.0009384739, 4.77811e-05, 3.89233e-05, 1.534e-07])
    torch.testing.assert_close(angles[[0, 1, 34, 35, 36, 63]], known, rtol=1e-3, atol=0)


def test_yarn_with_whole_bounds_has_the_known_angles_of_deepseek():
    table = precompute_freqs_cis(64, 2, 10000, YaRNArgs(40, 4096, 32, 1))
    known = [1.0, 0.0749894157, 0.0562341288, 0.0390069261, 0.0055000004, 0.0001778279]
    known += [3.3338e-05, 2.5e-05, 3.3338e-06]
    angles = table[1].angle()[[0, 9, 10, 11, 16, 22, 23, 24, 31]]
    torch.testing.assert_close(angles, torch.tensor(known), rtol=2e-5, atol=0)


def test_yarn_with_real_bounds_has_the_known_cosines_of_gpt_oss():
    cache = precompute_rope_cache(64, 2, 150000, YaRNArgs(32, 4096, 32, 1, truncate=False))
    known = [0.72755688, 1.03935814, 1.34291375, 1.34483552, 1.13310254, 0.85615128]
    entries = cache[1][[0, 1, 7, 8, 64, 65]] * yarn_mscale(32)
    torch.testing.assert_close(entries, torch.tensor(known), rtol=1e-6, atol=0)


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


def test_compiled_rotation_equals_eager():
    table = precompute_freqs_cis(8, 6)
    x = torch.randn(2, 6, 2, 8, requires_grad=True)
    rows = select_positions(table, None, 6)
    compiled = torch.compile(apply_rotary_emb, backend="aot_eager", fullgraph=True)
    for function in (apply_rotary_emb, compiled):
        out, _ = function(x, x.detach(), rows)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), x)
        if function is apply_rotary_emb:
            expected = out, grad
    torch.testing.assert_close((out, grad), expected)


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


# ---- on halves ----


def as_neighbours(x):
    """Move numbers i and i + D/2 of each head to 2i and 2i + 1."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def test_table_for_halves_has_the_known_cosines_and_sines():
    table = precompute_rope_cache(128, 4)
    assert table.shape == (4, 256) and table.dtype == torch.float32
    known = torch.tensor([0.5403, 0.6925, 0.8415, 0.7214])
    for first in (0, 64):  # both halves have the same numbers
        found = table[1, [first, first + 1, 128 + first, 129 + first]]
        torch.testing.assert_close(found, known, rtol=0, atol=5e-5)


@pytest.mark.parametrize("positions", [None, [[2, 0, 1]], [[4, 5, 0], [1, 2, 3]]])
def test_halves_turn_as_neighbours_do(positions):
    torch.manual_seed(0)
    xq, xk = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    given = None if positions is None else torch.tensor(positions)
    ours = apply_rotary_emb_to_halves(xq, xk, precompute_rope_cache(8, 6, 10000), given)
    table = precompute_freqs_cis(8, 6, 10000, None)
    theirs = apply_rotary_emb(as_neighbours(xq), as_neighbours(xk), table, given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(as_neighbours(one), other)


_FACTORS = [1.0 + 0.1 * i for i in range(6)]
_OF_TRANSFORMERS = {
    "default": (RoPEArgs(share=0.75), {"rope_type": "default", "partial_rotary_factor": 0.75}),
    "linear": (RoPEArgs(scaling=LinearRoPE(8.0)), {"rope_type": "linear", "factor": 8.0}),
    "proportional": (
        RoPEArgs(share=0.25, proportional=True),
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ),
    "longrope": (
        RoPEArgs(share=0.75, scaling=LongRoPE((1.0,) * 6, tuple(_FACTORS), 32), magnitude=1.2**0.5),
        {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 6,
            "long_factor": _FACTORS,
            "original_max_position_embeddings": 32,
            "factor": 64 / 32,
        },
    ),
}


@pytest.mark.parametrize("name", _OF_TRANSFORMERS)
def test_table_has_the_frequencies_and_the_magnitude_of_transformers(name):
    ours, parameters = _OF_TRANSFORMERS[name]
    config = transformers.PhiConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64
    )
    config.head_dim, config.rope_parameters = 16, parameters | {"rope_theta": 5e4}
    if name == "default":
        frequencies, magnitude = 1.0 / 5e4 ** (torch.arange(0, 12, 2).float() / 12), 1.0
    else:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=64)
    angles = torch.outer(torch.arange(64).float(), frequencies)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    table = ours.table(16, 64, theta=5e4, max_seq_len=64)
    torch.testing.assert_close(table, torch.cat((cos, cos, sin, sin), 1), rtol=1e-6, atol=1e-6)


def test_longrope_takes_the_short_factors_for_a_short_model():
    scaling = LongRoPE((1.0,) * 6, tuple(_FACTORS), original_seq_len=64)
    plain, scaled = RoPEArgs(share=0.75), RoPEArgs(share=0.75, scaling=scaling)
    for length in (64, 65):  # a longer row of one batch changes no frequency
        tables = [rope.table(16, length, 5e4, max_seq_len=64) for rope in (plain, scaled)]
        assert torch.equal(*tables)
