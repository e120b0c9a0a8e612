"""The reference's path of `torchtitan.rl.policy`."""

from torchtitan.rl.policy import PolicyTrainer

__all__ = ["PolicyTrainer"]
