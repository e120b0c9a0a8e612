"""The reference's path of `torchtitan.optim.optimizer`."""
# ruff: noqa: F401

from torchtitan.optim.optimizer import (
    OptimizersContainer,
    OptimizersInBackwardContainer,
    build_optimizers,
    build_optimizers_with_moe_load_balancing,
    skipped_where,
    skips_on_device,
)
