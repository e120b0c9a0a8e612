"""`torchtitan.rl.policy` under the name that the reference has for it, in `experiments/rl/actors`."""

from torchtitan.rl.policy import PolicyTrainer

__all__ = ["PolicyTrainer"]
