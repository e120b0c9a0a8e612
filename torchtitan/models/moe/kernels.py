"""Where each token goes when tokens are regrouped by expert."""

from torchtitan.distributed.token_groups import (
    fill_indices_cpu,
    fill_indices_wrapper,
    generate_permute_indices,
)

__all__ = ["fill_indices_cpu", "fill_indices_wrapper", "generate_permute_indices"]
