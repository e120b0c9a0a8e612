"""The policy as it was before RL, for losses that keep the trained policy near it."""

import torch
from torch import Tensor

from torchtitan.distributed.tied_copies import name_in_whole_model
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.snapshots import exchange, own_weights
from torchtitan.rl.types import TrainingBatch


class ReferencePolicy:
    """A copy of this rank's part of the policy's weights, and their log-probs.

    There is no second model: for a forward, the copy is swapped with the weights (and with the
    biases that balance experts).
    is_loaded: True if the copy came from a checkpoint.
    """

    def __init__(self, trainer: PolicyTrainer):
        self._trainer = trainer
        self.is_loaded = False
        self.take()

    def take(self) -> None:
        """Make the current weights the reference."""
        self._weights = {name: w.detach().clone() for name, w in own_weights(self._trainer.engine)}

    def logprobs(self, batch: TrainingBatch) -> list[Tensor | None]:
        """Return what `PolicyTrainer.forward` returns, under the reference. Collective."""
        exchange(self._trainer.engine, self._weights)
        try:
            return self._trainer.forward(batch)
        finally:
            exchange(self._trainer.engine, self._weights)

    def _name_in_whole_model(self, name: str) -> str:
        for part in self._trainer.engine.model_parts:
            name = name_in_whole_model(part, name)
        return name

    def state_dict(self) -> dict[str, Tensor]:
        return {self._name_in_whole_model(name): w for name, w in self._weights.items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint; the loader usually filled our tensors in place already."""
        self.is_loaded = True
        with torch.no_grad():
            for name, weight in self._weights.items():
                tensor = state_dict[self._name_in_whole_model(name)]
                if tensor is not weight:
                    weight.copy_(tensor)
