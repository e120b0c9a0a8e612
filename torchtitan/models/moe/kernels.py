"""torchtitan 0.2.x's import path for the index computation of `torchtitan.distributed.token_groups`."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from torchtitan.distributed.token_groups import (
    fill_indices_cpu,
    fill_indices_wrapper,
    generate_permute_indices,
)
