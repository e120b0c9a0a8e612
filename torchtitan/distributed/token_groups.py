"""Regrouping tokens by expert: plain torch on every device.

R source ranks, E experts on this rank. The input is ordered by [rank][expert], the output by
[expert][rank], and each expert's tokens are in a slot of aligned size.
"""

import sys
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.tools import host

# Alignment in tokens. Kernels need groups that begin at multiples of 16 bytes, which are 8 elements of bf16.
# Converters to 8 bits increase the alignment.
TOKEN_GROUP_ALIGN_SIZE_M = 8
ValidTokenGroupAlignmentSize = Literal[8, 16, 32]


def set_token_group_alignment_size_m(alignment_size: ValidTokenGroupAlignmentSize) -> None:
    """From now on, pad the tokens of each expert to a multiple of 8, 16 or 32."""
    if alignment_size not in (8, 16, 32):
        raise ValueError(
            f"the alignment of expert groups must be 8, 16 or 32, got {alignment_size}"
        )
    host.change_attribute(sys.modules[__name__], "TOKEN_GROUP_ALIGN_SIZE_M", alignment_size)


def kernel_alignment(device: torch.device) -> int:
    """Return the multiple to which each expert's tokens are padded for the device's kernels."""
    return 1 if device.type == "cpu" else TOKEN_GROUP_ALIGN_SIZE_M


def permute_tokens(
    x: Tensor, counts: Tensor, num_ranks: int, experts_per_rank: int, alignment: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Reorder x [N, D] from [rank][expert] to [expert][rank], with zeros as padding to aligned slots.

    counts: [R * E] int. Returns (shape of x with one more row; reordered x [M, D], where M depends only
    on N; the input row of each output row, [M], -1 for padding; slot sizes [E] int32).
    """
    padded_len = x.shape[0] + experts_per_rank * alignment
    padded_len = (padded_len + alignment - 1) // alignment * alignment
    indices, m_sizes, _ = generate_permute_indices(
        counts, experts_per_rank, num_ranks, padded_len, alignment
    )
    places = inverse_rows(indices, x.shape[0]).unsqueeze(1)
    reordered = take_rows(x, indices, places, rows_have_gaps=True)
    return torch.Size((x.shape[0] + 1, *x.shape[1:])), reordered, indices, m_sizes


def unpermute_tokens(out: Tensor, input_shape: torch.Size, indices: Tensor) -> Tensor:
    """Undo `permute_tokens`: [M, D] -> [N, D]. Drops the padding rows, whatever their values."""
    rows = inverse_rows(indices, input_shape[0] - 1)
    return take_rows(out, rows, indices.unsqueeze(1), places_have_gaps=True)


def inverse_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return the position in `rows` of each row index 0..num_rows-1: [num_rows], -1 if absent.

    rows: [M], distinct row indices, and -1 in gaps.
    """
    inverse = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=rows.device)
    target = torch.where(rows < 0, num_rows, rows).long()
    return inverse.scatter(0, target, torch.arange(rows.shape[0], device=rows.device))[:-1]


def take_rows(
    x: Tensor,
    rows: Tensor,
    places: Tensor,
    *,
    rows_have_gaps: bool = False,
    places_have_gaps: bool = False,
) -> Tensor:
    """Return x[rows]: [N, D] -> [M, D], with zeros where the row is -1.

    places: [N, c], for each row of x the rows of the result that are its copies; -1 for none. Backward
        gathers their gradients and sums them in fp32, in order; the backward of `x[rows]` adds in any order.
    """
    return _TakeRows.apply(x, rows, places, rows_have_gaps, places_have_gaps)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, places: Tensor, rows_gaps: bool, places_gaps: bool
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.places_gaps = places_gaps
        return _take(x, rows, rows_gaps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (places,) = ctx.saved_tensors
        copies = _take(grad, places.flatten(), ctx.places_gaps).unflatten(0, places.shape)
        return copies.squeeze(1) if places.shape[1] == 1 else copies.sum(1), None, None, None, None


def _take(x: Tensor, rows: Tensor, have_gaps: bool) -> Tensor:
    if not have_gaps:
        return x.index_select(0, rows)
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], *x.shape[1:])
    return x.index_select(0, rows.clamp(min=0)).masked_fill((rows < 0).unsqueeze(1), 0)


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (indices, sizes, ends) of the aligned slots, all int32, without waiting for the device.

    tokens_per_expert_group: [R * E] int. An expert without tokens has a slot of `alignment` tokens.
    indices [max_len]: the token at each place of the buffer, -1 for none. sizes, ends: [E].
    """
    if use_cpu:
        tokens_per_expert_group = tokens_per_expert_group.cpu()
    start_index_values = tokens_per_expert_group.cumsum(0) - tokens_per_expert_group
    totals = tokens_per_expert_group.view(num_ranks, experts_per_rank).sum(0).clamp(min=alignment)
    m_sizes = (totals + alignment - 1) // alignment * alignment
    m_offsets = m_sizes.cumsum(0)
    permuted_indices = fill_indices_wrapper(
        tokens_per_expert_group,
        start_index_values,
        m_offsets - m_sizes,
        experts_per_rank,
        num_ranks,
        max_len,
    )
    return permuted_indices, m_sizes.int(), m_offsets.int()


def fill_indices_wrapper(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    block_size: int = 128,
    max_blocks: int = 1024,
) -> Tensor:
    """Return the token at each of `max_len` places: [max_len] int32, -1 for none.

    tokens_per_expert_group: [R * E], the number of tokens from each rank for each expert.
    start_index_values: [R * E], where these tokens begin in the input.
    write_offsets: [E], where each expert's slot begins in the output; ascending.
    block_size, max_blocks: accepted for compatibility; they tune a kernel that we don't have.
    """

    def by_expert(values: Tensor) -> Tensor:  # [R * E] -> [E, R]
        return values.view(num_ranks, experts_per_rank).t()

    lengths = by_expert(tokens_per_expert_group).long()
    within_slot = (lengths.cumsum(1) - lengths).flatten()
    # Add last, to get a new tensor: torch 2.11 can't compile searchsorted on a view.
    runs = write_offsets.repeat_interleave(num_ranks) + within_slot
    place = torch.arange(max_len, device=runs.device)
    # A run is one rank's tokens for one expert. A place belongs to the last run that begins at or before
    # the place. If several runs begin at the same place, all but the last are empty.
    run = torch.searchsorted(runs, place, right=True) - 1
    run_or_first = run.clamp(min=0)
    within = place - runs[run_or_first]
    filled = (run >= 0) & (within < lengths.flatten()[run_or_first])
    token = by_expert(start_index_values).flatten()[run_or_first] + within
    return torch.where(filled, token, -1).int()


def fill_indices_cpu(*arguments: Any) -> Tensor:
    """`fill_indices_wrapper`, computed on the CPU whatever the inputs' device."""
    return fill_indices_wrapper(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
