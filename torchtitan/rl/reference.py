"""The policy as it was before RL, for losses that keep the new one near it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan.distributed.dtensor import local_tensor
from torchtitan.rl.trainer import PolicyTrainer
from torchtitan.rl.types import TrainingBatch


class ReferencePolicy:
    """A copy of the policy's weights, each rank its own part of them, and their log-probs.

    There is no second model: for a forward, the copy takes the place of the weights.
    """

    def __init__(self, trainer: PolicyTrainer):
        self._trainer = trainer
        self._weights: dict[str, Tensor] = {}
        self.take()

    def take(self) -> None:
        """Make the weights of this moment the reference."""
        self._weights = {name: p.detach().clone() for name, p in self._parameters()}

    def logprobs(self, batch: TrainingBatch) -> list[Tensor | None]:
        """As `PolicyTrainer.forward`, under the reference. Collective."""
        with self._in_place():
            return self._trainer.forward(batch)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self._parameters():
            own, other = local_tensor(p), local_tensor(self._weights[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for part in self._trainer.engine.model_parts:
            yield from part.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """The tensors were read in place already; replaced ones are copied."""
        with torch.no_grad():
            for name, tensor in state_dict.items():
                if tensor is not self._weights[name]:
                    self._weights[name].copy_(tensor)
