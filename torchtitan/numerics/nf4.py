"""Frozen matrices in 4 bits: NF4, the "normal float" of QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

A row of numbers is cut into blocks of 64. A block is stored in 36 bytes: 32 bytes that hold two indices into
`VALUES` each, the first index in the upper half, and the block's largest absolute value in fp32. Each number
becomes VALUES[index] * largest, with the index of the nearest value. bitsandbytes without double
quantization stores the same numbers if rows are multiples of 64 numbers.

Numbers [..., N, K] are stored as uint8 [..., N, 36 * K / 64]. A part of the rows, or of a row's blocks,
is stored as the same part of the stored tensor, so stored tensors are sharded like other parameters.
`linear` and grouped products take stored weights. They dequantize a weight for one product at a time, also
in backward, and give it no gradient.
"""

import functools
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from torchtitan.numerics.linear import is_slow_product, linear

# Quantiles of the normal distribution, divided by the largest quantile (appendix E of the paper).
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # numbers in a block
BYTES = BLOCK // 2 + 4
_NUMBERS_AT_ONCE = 2**22  # limits the memory of temporary tensors


def count(stored: int) -> int:
    """Return how many numbers are stored in `stored` bytes."""
    return stored * BLOCK // BYTES


def num_numbers(parameter: Tensor) -> int:
    """Return the parameter's number of elements before quantization."""
    n = parameter.numel()
    return count(n) if parameter.dtype == torch.uint8 else n


def empty_numbers(stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised tensor for the numbers of a stored tensor."""
    shape = *stored.shape[:-1], count(stored.shape[-1])
    return torch.empty(shape, dtype=dtype, device=stored.device)


@torch.no_grad()
def quantize(numbers: Tensor) -> Tensor:
    """Return numbers [..., K] in 4 bits, uint8 [..., 36 * K / 64]. K: a multiple of 64."""
    stored = numbers.new_empty(
        (*numbers.shape[:-1], numbers.shape[-1] // BLOCK * BYTES), dtype=torch.uint8
    )
    values = torch.tensor(VALUES, device=numbers.device)
    bounds = (values[1:] + values[:-1]) / 2
    for into, rows in _in_parts(stored, numbers):
        blocks = rows.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        # In a block of zeros: 0 instead of infinity.
        scaled = blocks * largest.reciprocal().nan_to_num(posinf=0)
        indices = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
        pairs = indices[..., ::2] << 4 | indices[..., 1::2]
        into.copy_(torch.cat([pairs, largest.view(torch.uint8)], dim=-1).flatten(-2))
    return stored


@torch.no_grad()
def dequantize(stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers [..., K] of a stored tensor, rounded once to `dtype`."""
    numbers = empty_numbers(stored, dtype)
    table = _pairs(stored.device)
    for rows, into in _in_parts(stored, numbers):
        blocks = rows.unflatten(-1, (-1, BYTES))
        indices, largest = blocks[..., : BLOCK // 2], blocks[..., BLOCK // 2 :]
        found = table.index_select(0, indices.flatten().int()).view(torch.float32)
        largest = largest.contiguous().view(torch.float32)
        torch.mul(
            found.view(*largest.shape[:-1], BLOCK), largest, out=into.unflatten(-1, (-1, BLOCK))
        )
    return numbers


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return a table from a byte of indices to its two fp32 values, viewed as float64 [256]."""
    values = torch.tensor(VALUES)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    return pairs.view(torch.float64).squeeze(1).to(device)


def _in_parts(*tensors: Tensor) -> Any:
    """Yield slices of the tensors' rows, each with at most about `_NUMBERS_AT_ONCE` elements."""
    rows = [t.flatten(0, -2) if t.ndim > 1 else t.unsqueeze(0) for t in tensors]
    n = max(1, _NUMBERS_AT_ONCE // max(1, *(t.shape[-1] for t in rows)))
    return zip(*(t.split(n) for t in rows), strict=True)


# ---- products: one operator, so that the compiler doesn't keep dequantized weights for backward ----

_library = library.Library("torchtitan", "FRAGMENT")
_library.define("nf4_mm(Tensor x, Tensor weight, Tensor? offsets, bool transposed) -> Tensor")


def _mm(x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool) -> Tensor:
    """Return x [..., K] times the transposed weight [N, K], or, if `transposed`, x [..., N] times the weight.

    weight: stored. offsets: for experts [E, N, K], see `grouped_mm`.
    """
    numbers = dequantize(weight, x.dtype)
    if offsets is None:
        return linear(x, numbers.t() if transposed else numbers)
    numbers = numbers if transposed else numbers.mT
    if not is_slow_product(x):
        return F.grouped_mm(x, numbers, offs=offsets)
    return F.grouped_mm(x.float(), numbers.float(), offs=offsets).to(x.dtype)


def _shape_of_mm(x: Tensor, weight: Tensor, offsets: Tensor | None, transposed: bool) -> Tensor:
    n = count(weight.shape[-1]) if transposed else weight.shape[-2]
    return x.new_empty(*x.shape[:-1], n)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    weight, offsets = ctx.saved_tensors
    multiply = torch.ops.torchtitan.nf4_mm
    return multiply(grad.contiguous(), weight, offsets, not ctx.transposed), None, None, None


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, weight, offsets, ctx.transposed = inputs
    ctx.save_for_backward(weight, offsets)


for _device in ("CPU", "CUDA"):
    _library.impl("nf4_mm", _mm, _device)
_library.impl("nf4_mm", _shape_of_mm, "Meta")
library.register_autograd("torchtitan::nf4_mm", _backward, setup_context=_save, lib=_library)
