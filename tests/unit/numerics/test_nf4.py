"""Matrices in 4 bits: bitsandbytes' numbers, and products that are those of the numbers."""

import pytest
import torch
from torch.nn import functional as F

from torchtitan.numerics import linear as linear_module
from torchtitan.numerics import nf4
from torchtitan.numerics.linear import linear

# `quantize_4bit(w, blocksize=64, quant_type="nf4")` of bitsandbytes 0.50.2 for w of `matrix()`.
INDICES = """
78cefd308f23f0d3c2e0d81ce4128deeeec7216e91bb1e2d2d1b92bc425bdddcfffb206f70e53e1e1c81e619eb311122
1126dd32d92d2b4b2d28d33cd8322222015ef50be0d74c3a92e32ec214adeeeda512ae42d45c2d2b73d52bd722356653
007fd14f17c1e1d53e13eb114adeeed9313cd24e2994a56c1ca25dc732222224
"""
LARGEST = [0.9601864218711853, 0.5198320746421814, 0.27576392889022827, 0.14035487174987793]


def matrix():
    k = torch.arange(256, dtype=torch.float64)
    return (torch.sin(0.1 * k * k) * 0.99**k).float().view(2, 128)


def test_indices_and_scales_are_those_of_bitsandbytes():
    stored = nf4.quantize(matrix())
    assert stored.shape == (2, 72)
    assert stored.dtype == torch.uint8
    blocks = stored.view(4, 36)
    assert bytes(blocks[:, :32].flatten().tolist()) == bytes.fromhex("".join(INDICES.split()))
    assert blocks[:, 32:].contiguous().view(torch.float32).flatten().tolist() == LARGEST
    numbers = nf4.dequantize(stored)
    # Worked by hand: indices 7 and 8 stand for 0 and 0.0795803, times the first block's scale.
    assert numbers[0, :2].tolist() == pytest.approx([0.0, 0.0764119], abs=1e-7)
    assert torch.equal(nf4.dequantize(stored, torch.bfloat16), numbers.bfloat16())
    assert torch.equal(nf4.quantize(matrix().bfloat16()), nf4.quantize(matrix().bfloat16().float()))


def test_values_are_quantiles_of_the_normal_distribution():
    """Eight of the positive half and nine of the negative half share zero (QLoRA, appendix E)."""
    positive, negative = (
        torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64))[:-1]
        for n in (9, 8)
    )
    values = torch.cat([positive, torch.zeros(1), -negative]).sort().values
    found = torch.tensor(nf4.VALUES, dtype=torch.float64)
    torch.testing.assert_close(found, values / values.max(), rtol=0, atol=2e-7)


def test_zeros_stay_zero_bad_numbers_show_and_parts_are_quantized_alike(monkeypatch):
    numbers = matrix().repeat(8, 1)
    numbers[0, :64], numbers[1, 3], numbers[2, 70] = 0, torch.nan, torch.inf
    stored = nf4.quantize(numbers)
    again = nf4.dequantize(stored)
    assert not again[0, :64].any()
    assert again[1, :64].isnan().all() and not again[2, 64:].isfinite().any()
    experts = numbers.view(4, 4, 128)
    assert torch.equal(nf4.quantize(experts).view(16, 72), stored)
    assert torch.equal(nf4.quantize(numbers[:, 64:]), stored[:, 36:])
    assert torch.equal(nf4.dequantize(stored[3:5, 36:]), again[3:5, 64:])
    assert nf4.dequantize(nf4.quantize(numbers[:0])).shape == (0, 128)
    monkeypatch.setattr(nf4, "_NUMBERS_AT_ONCE", 128)
    assert torch.equal(nf4.quantize(experts).view(16, 72), stored)
    assert torch.equal(nf4.dequantize(stored).nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "slow bfloat16", "autocast"])
def test_linear_computes_with_the_numbers_forward_and_backward(kind, monkeypatch):
    monkeypatch.setattr(linear_module, "_cpu_multiplies_bf16", kind != "slow bfloat16")
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 128, generator=generator).to(dtype)
    stored = nf4.quantize(torch.randn(8, 128, generator=generator))
    numbers = nf4.dequantize(stored, torch.bfloat16 if kind == "autocast" else dtype)
    bias = torch.ones(8) if kind == "float32" else None  # bf16 would round once more
    results = []
    for weight in (stored, numbers):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            out = linear(own, weight, bias)
        out.square().sum().backward()
        results.append((out, own.grad))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_grouped_product_computes_with_the_numbers_forward_and_backward():
    generator = torch.Generator().manual_seed(0)
    x, offsets = torch.randn(16, 128, generator=generator), torch.tensor([5, 5, 16]).int()
    stored = nf4.quantize(torch.randn(3, 8, 128, generator=generator))
    numbers, own = nf4.dequantize(stored), x.clone().requires_grad_()
    out = torch.ops.torchtitan.nf4_mm(own, stored, offsets, False)
    expected = torch.cat([F.linear(x[:5], numbers[0]), F.linear(x[5:], numbers[2])])
    torch.testing.assert_close(out, expected)
    factors = torch.randn(out.shape, generator=generator)
    (out * factors).sum().backward()
    expected = torch.cat([factors[:5] @ numbers[0], factors[5:] @ numbers[2]])
    torch.testing.assert_close(own.grad, expected)
