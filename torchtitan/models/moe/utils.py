"""Regrouping tokens by expert, each group padded to a size that the grouped kernels take."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.distributed import token_groups
from torchtitan.distributed.token_groups import (
    ValidTokenGroupAlignmentSize,
    set_token_group_alignment_size_m,
)
from torchtitan.distributed.token_groups import unpermute_tokens as _unpermute


def __getattr__(name: str) -> Any:
    if name == "TOKEN_GROUP_ALIGN_SIZE_M":  # read at each access, because the value can change
        return token_groups.TOKEN_GROUP_ALIGN_SIZE_M
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _permute(
    x: Tensor, num_tokens_per_expert: Tensor, ep_degree: int, num_local_experts: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """`permute_tokens` with the alignment that the kernels need."""
    alignment = token_groups.TOKEN_GROUP_ALIGN_SIZE_M
    return token_groups.permute_tokens(
        x, num_tokens_per_expert, ep_degree, num_local_experts, alignment
    )


def indices_padding_wrapper(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `func(*weights, x, num_tokens_per_expert)`, so that it takes x sorted by rank and then by expert.

    The wrapper sorts and pads the tokens by local expert, calls func, and then restores order and size.
    The largest dim 0 of the weights is the number of local experts.
    """

    # No `functools.wraps`: the compiler cannot trace it if `func` is a partial.
    def padded(*weights_x_and_counts: Tensor) -> Tensor:
        *weights, x, num_tokens_per_expert = weights_x_and_counts
        num_local_experts = max(weight.shape[0] for weight in weights)
        ep_degree = num_tokens_per_expert.shape[0] // num_local_experts
        input_shape, x, indices, padded_counts = _permute(
            x, num_tokens_per_expert, ep_degree, num_local_experts
        )
        return _unpermute(func(*weights, x, padded_counts), input_shape, indices)

    return padded
