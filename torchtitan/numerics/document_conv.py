"""The short causal convolution in front of the gated delta rule, within documents.

B rows, T tokens, N channels, W taps. Token t of a row gets silu(sum over j < W of w[:, W - 1 - j] x[t - j]),
where x counts as 0 before the start of t's document.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def document_conv(x: Tensor, weight: Tensor, starts: Tensor, tail: Tensor | None = None) -> Tensor:
    """Return [B, T, N] in x's dtype; the sum is rounded once, before the SiLU.

    x: [B, T, N]; weight: [N, W]; starts: int [B, T], as for `delta_rule.gated_delta_rule`: negative if the
    document began before these tokens; the document's last inputs are in `tail` [B, W - 1, N] (see
    `conv_tail`; None is zeros).
    """
    # The compiler fuses the plain steps. Torch 2.11 also loses gradients if it traces through the class.
    sum_taps = _sum_taps if torch.compiler.is_compiling() else _DocumentConv.apply
    return F.silu(sum_taps(x, weight, starts, tail))


def conv_tail(
    x: Tensor, starts: Tensor, lengths: Tensor, width: int, tail: Tensor | None = None
) -> Tensor:
    """Return the last inputs [B, W - 1, N] of each row: the `tail` with which `document_conv` continues the row.

    lengths: [B], number of tokens of each row. x, starts and tail: the inputs of `document_conv`.
    """
    inputs = _after_tail(x, width, tail)
    places = lengths.long().unsqueeze(1) + torch.arange(width - 1, device=x.device)
    first = starts.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).long()
    first = torch.where((first < 0) | (lengths.unsqueeze(1) == 0), -width, first)
    is_before = places - (width - 1) < first
    return inputs[torch.arange(len(x), device=x.device)[:, None], places].masked_fill(
        is_before.unsqueeze(2), 0
    )


def _after_tail(x: Tensor, width: int, tail: Tensor | None) -> Tensor:
    tail = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if tail is None else tail.to(x.dtype)
    return torch.cat((tail, x), dim=1)


def _is_other(starts: Tensor, back: int) -> Tensor:
    """Return bool [B, T, 1], True where the token `back` places earlier is in another document."""
    columns = torch.arange(starts.shape[1], device=starts.device)
    return ((columns - back < starts) & (starts >= 0)).unsqueeze(2)


def _sum_taps(x: Tensor, weight: Tensor, starts: Tensor, tail: Tensor | None) -> Tensor:
    length, width, dtype = x.shape[1], weight.shape[1], _sum_dtype(x)
    inputs, weight = _after_tail(x.to(dtype), width, tail), weight.to(dtype)
    total = inputs[:, width - 1 :] * weight[:, -1]
    for back in range(1, width):
        place = width - 1 - back
        # `where`, because multiplying by 0 would keep NaN and infinities of other documents.
        tap = torch.where(_is_other(starts, back), 0, inputs[:, place : place + length])
        total = torch.addcmul(total, tap, weight[:, place])
    return total.to(x.dtype)


class _DocumentConv(torch.autograd.Function):
    """`_sum_taps`, without keeping the shifted inputs for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor, tail: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, starts, tail)
        return _sum_taps(x, weight, starts, tail)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, starts, tail = ctx.saved_tensors
        length, width, dtype = x.shape[1], weight.shape[1], _sum_dtype(x)
        inputs, taps, grad = _after_tail(x.to(dtype), width, tail), weight.to(dtype), grad.to(dtype)
        grad_inputs = torch.zeros_like(inputs)
        grad_weight = torch.zeros_like(taps)
        for back in range(width):
            place = width - 1 - back
            reached = grad if back == 0 else torch.where(_is_other(starts, back), 0, grad)
            grad_inputs[:, place : place + length].addcmul_(reached, taps[:, place])
            grad_weight[:, place] = (reached * inputs[:, place : place + length]).sum((0, 1))
        grad_tail, grad_x = grad_inputs.split((width - 1, length), dim=1)
        return (
            grad_x.to(x.dtype),
            grad_weight.to(weight.dtype),
            None,
            None if tail is None else grad_tail.to(tail.dtype),
        )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
