"""Upstream torchtitan's name, in `experiments/rl/actors`, for `torchtitan.rl.policy`."""

from torchtitan.rl.policy import PolicyTrainer

__all__ = ["PolicyTrainer"]
