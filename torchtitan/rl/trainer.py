"""Import path of upstream torchtitan (`experiments/rl/actors`); the code is in `torchtitan.rl.policy`."""

from torchtitan.rl.policy import PolicyTrainer

__all__ = ["PolicyTrainer"]
