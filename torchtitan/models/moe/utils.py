"""Regrouping tokens by expert, each group padded to a size that the grouped kernels take."""

from collections.abc import Callable
from functools import wraps
from typing import Literal

import torch
from torch import Tensor

from torchtitan.models.moe.kernels import generate_permute_indices

# Rows: 16 bytes of bf16. Read through the module, since converters to 8 bits raise it.
TOKEN_GROUP_ALIGN_SIZE_M = 8
ValidTokenGroupAlignmentSize = Literal[8, 16, 32]


def set_token_group_alignment_size_m(alignment_size: ValidTokenGroupAlignmentSize) -> None:
    """Pad the tokens of each expert up to a multiple of 8, 16 or 32 from here on."""
    if alignment_size not in (8, 16, 32):
        raise ValueError(
            f"the alignment of expert groups must be 8, 16 or 32, got {alignment_size}"
        )
    global TOKEN_GROUP_ALIGN_SIZE_M
    TOKEN_GROUP_ALIGN_SIZE_M = alignment_size


def _permute(
    x: Tensor, num_tokens_per_expert: Tensor, ep_degree: int, num_local_experts: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Reorder x [N, D] from [source rank][local expert] to [local expert], with padding.

    num_tokens_per_expert: [ep_degree * num_local_experts] int.
    Returns (shape of x with the zero row that padding comes from, padded x [M, D], the row of
    each of its M rows, padded counts [num_local_experts] int32). M follows from N alone, so
    nothing waits for the device; rows past the sum of the counts belong to no expert.
    """
    alignment = TOKEN_GROUP_ALIGN_SIZE_M
    padded_len = x.shape[0] + num_local_experts * alignment
    padded_len = (padded_len + alignment - 1) // alignment * alignment
    permuted_indices, m_sizes, _ = generate_permute_indices(
        num_tokens_per_expert, num_local_experts, ep_degree, padded_len, alignment
    )
    x = torch.cat([x, x.new_zeros(1, x.shape[-1])])
    return x.shape, x[permuted_indices], permuted_indices, m_sizes


def _unpermute(out: Tensor, input_shape: torch.Size, permuted_indices: Tensor) -> Tensor:
    """Undo `_permute`: [M, D] -> [N, D], without padding."""
    # Padding, which may hold anything, all goes to the last row. D may differ from the input's.
    unpermuted = out.new_empty(input_shape[0], out.shape[-1])
    unpermuted[permuted_indices] = out
    return unpermuted[:-1]


def indices_padding_wrapper(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pad the groups of tokens before `func(w1, w2, w3, x, num_tokens_per_expert)`, not after.

    There may be any number of weights; dim 0 of the first counts the experts.
    """

    @wraps(func)
    def padded(*weights_x_and_counts: Tensor) -> Tensor:
        *weights, x, num_tokens_per_expert = weights_x_and_counts
        num_local_experts = weights[0].shape[0]
        ep_degree = num_tokens_per_expert.shape[0] // num_local_experts
        input_shape, x, permuted_indices, padded_counts = _permute(
            x, num_tokens_per_expert, ep_degree, num_local_experts
        )
        out = func(*weights, x, padded_counts)
        return _unpermute(out, input_shape, permuted_indices)

    return padded
