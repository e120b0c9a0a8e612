"""Mistakes by which packed documents see each other in linear attention, most of them published ones.

`starts` [B, T] is the column where each token's document begins. A leak replaces the delta rule, the
convolution or the layer's forward by a function of the right one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def columns(starts: Tensor) -> Tensor:
    return torch.arange(starts.shape[1], dtype=starts.dtype).expand(starts.shape)


def starts_in(starts: Tensor) -> Tensor:
    return starts == columns(starts)


def starts_of(is_start: Tensor, dtype: torch.dtype) -> Tensor:
    is_start = is_start.clone()
    is_start[:, 0] = True
    places = torch.arange(is_start.shape[1], dtype=dtype).expand(is_start.shape)
    return torch.where(is_start, places, 0).cummax(dim=1).values


# ---- other boundaries ----


def none(starts: Tensor) -> Tensor:
    return torch.zeros_like(starts)


def a_token_late(starts: Tensor) -> Tensor:
    return starts_of(starts_in(starts).roll(1, dims=1), starts.dtype)


def a_token_early(starts: Tensor) -> Tensor:
    return starts_of(starts_in(starts).roll(-1, dims=1), starts.dtype)


def not_for_one_token(starts: Tensor) -> Tensor:
    is_start = starts_in(starts)
    is_alone = is_start & F.pad(is_start[:, 1:], (0, 1), value=True)
    return starts_of(is_start & ~is_alone, starts.dtype)


def of_the_first_row(starts: Tensor) -> Tensor:
    return starts[:1].expand(starts.shape).contiguous()


def of_a_shard(starts: Tensor) -> Tensor:
    """The second half of a row takes its own beginning for that of a document."""
    middle = starts.shape[1] // 2
    return torch.where(columns(starts) >= middle, starts.clamp(min=middle), starts)


# ---- the delta rule ----


def running_sum(q, k, v, g, beta, starts, chunk=64, **_):
    """The chunked rule with one sum of g over the chunk: right to rounding, but rounded with all documents."""
    heads = v.shape[2] // k.shape[2]
    q, k = (F.normalize(x, dim=-1, eps=0).repeat_interleave(heads, 2) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q * k.shape[-1] ** -0.5, k, v, g, beta))
    state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for first in range(0, starts.shape[1], chunk):
        part = slice(first, first + chunk)
        qc, kc, vc, gc, bc = (x[:, :, part] for x in (q, k, v, g, beta))
        begins, places = starts[:, part], columns(starts)[:, part]
        sums = gc.cumsum(-1)
        related = (begins[:, :, None] <= places[:, None]) & (places[:, None] <= places[:, :, None])
        gaps = sums.unsqueeze(-1) - sums.unsqueeze(-2)
        decay = gaps.masked_fill(~related.unsqueeze(1), -math.inf).exp()
        carry = sums.masked_fill((begins >= first).unsqueeze(1) & (first > 0), -math.inf).exp()
        system = bc.unsqueeze(-1) * (kc @ kc.mT) * decay
        right = bc.unsqueeze(-1) * torch.cat([vc, kc * carry.unsqueeze(-1)], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        u = u - w @ state
        outs.append((qc * carry.unsqueeze(-1)) @ state + (qc @ kc.mT * decay) @ u)
        state = carry[..., -1:, None] * state + (kc * decay[..., -1, :].unsqueeze(-1)).mT @ u
    return torch.cat(outs, 2).transpose(1, 2), state


def with_boundaries(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the leak of a rule (q, k, v, g, beta, starts) or a convolution (x, weight, starts)."""

    def leak(right: Callable[..., Any]) -> Callable[..., Any]:
        def function(*inputs: Any, **options: Any) -> Any:
            at = 2 if len(inputs) < 5 else 5
            return right(*inputs[:at], change(inputs[at]), *inputs[at + 1 :], **options)

        return function

    return leak


def rows_in_one_sequence(rule):
    """The first document of a row goes on with the last one of the row before."""

    def function(*inputs, **options):
        *tensors, starts = inputs[:6]
        is_start = starts_in(starts) & (columns(starts) > 0)
        flat = starts_of(is_start.flatten()[None], starts.dtype)
        out, state = rule(*(x.flatten(0, 1)[None] for x in tensors), flat, **options)
        return out.view(*starts.shape, *out.shape[2:]), state

    return function


def decayed_in_place_of_reset(rule):
    def function(q, k, v, g, beta, starts, *more, **options):
        g = torch.where(starts_in(starts).unsqueeze(-1), -12.0, g)
        return rule(q, k, v, g, beta, none(starts), *more, **options)

    return function


def gradient_of_decays(rule):
    """The right output, but the gradient of g is that of a kept state."""

    def function(q, k, v, g, beta, starts, **options):
        leaky = rule(q.detach(), k.detach(), v.detach(), g, beta.detach(), none(starts), **options)[
            0
        ]
        out, state = rule(q, k, v, g.detach(), beta, starts, **options)
        return out + (leaky - leaky.detach()), state

    return function


# ---- the convolution ----


def one_tap_off(convolution):
    """The first tap before a document counts."""

    def function(x, weight, starts, *more):
        previous = convolution(x, weight, a_token_early(starts), *more)
        right = convolution(x, weight, starts, *more)
        return torch.where(starts_in(starts).unsqueeze(-1), previous, right)

    return function


def around_the_row(convolution):
    """The taps before a row are those at its end."""

    def function(x, weight, starts, *more):
        width = weight.shape[1] - 1
        longer = torch.cat([x[:, -width:], x], 1) if width <= x.shape[1] else x
        added = longer.shape[1] - x.shape[1]
        begins = torch.where(starts > 0, starts + added, 0)
        begins = torch.cat([torch.zeros_like(begins[:, :1]).expand(-1, added), begins], 1)
        return convolution(longer, weight, begins.contiguous(), *more)[:, added:]

    return function


def a_token_ahead(convolution):
    def function(x, weight, starts, *more):
        return convolution(F.pad(x[:, 1:], (0, 0, 0, 1)), weight, starts, *more)

    return function


# ---- the layer ----


def mean_of_the_row(forward):
    return lambda x, *more: forward(x, *more) + 1e-3 * x.mean(1, keepdim=True)


RULE, CONVOLUTION, LAYER = "gated_delta_rule", "document_conv", "forward"
# what is replaced, and by which function of it
LEAKS: dict[str, dict[str, Callable[..., Any]]] = {
    "state kept": {RULE: with_boundaries(none)},
    "convolution kept": {CONVOLUTION: with_boundaries(none)},
    "running sum": {RULE: lambda rule: running_sum},
    "state decayed in place of reset": {RULE: decayed_in_place_of_reset},
    "state reset a token late": {RULE: with_boundaries(a_token_late)},
    "state reset a token early": {RULE: with_boundaries(a_token_early)},
    "convolution reset a token late": {CONVOLUTION: with_boundaries(a_token_late)},
    "convolution reset a token early": {CONVOLUTION: with_boundaries(a_token_early)},
    "states of one token kept": {RULE: with_boundaries(not_for_one_token)},
    "boundaries of the first row": {RULE: with_boundaries(of_the_first_row)},
    "boundaries of a shard": {RULE: with_boundaries(of_a_shard)},
    "state goes on in the next row": {RULE: rows_in_one_sequence},
    "one tap off": {CONVOLUTION: one_tap_off},
    "taps from the row's end": {CONVOLUTION: around_the_row},
    "taps a token ahead": {CONVOLUTION: a_token_ahead},
    "gradient of decays": {RULE: gradient_of_decays},
    "mean of the row": {LAYER: mean_of_the_row},
}
