"""torchtitan 0.2.x's path of the index computation in `torchtitan.distributed.token_groups`."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from torchtitan.distributed.token_groups import (
    fill_indices_cpu,
    fill_indices_wrapper,
    generate_permute_indices,
)
