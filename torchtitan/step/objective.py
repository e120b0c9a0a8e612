"""What a trainer minimizes: a head, a loss of its outputs, and the count that divides the loss.

B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.step.runner import Head


class Objective:
    """The loss of the train spec, summed over labels. Subclasses replace it.

    head, whole_rows: see `TrainingEngine.forward_backward_step`.
    """

    replaces_loss = False
    head: Head[Any] | None = None
    whole_rows = False

    def denominator(self, batch: TokenBatch) -> int:
        """Return what a batch on the CPU adds to the loss denominator. Called by the reading thread."""
        return batch.num_valid

    def prepare(self, batches: Sequence[TokenBatch]) -> Sequence[TokenBatch]:
        """Return the batches with the entries that another model computes. Collective."""
        return batches

    def __call__(
        self, outputs: Any, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (a microbatch's loss, name -> what the microbatch adds to a sum, of any shape)."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        """Return the metrics to log. sums: those of `__call__`, over all ranks, since the last log.

        prefix: "loss_metrics/" or "validation_metrics/".
        """
        return {}

    @property
    def for_validation(self) -> "Objective":
        return self

    def close(self) -> None:
        """Close the engines of other models."""


class Tally:
    """A loss function that computes an objective, and adds up the sums for its metrics."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._sums: dict[str, Tensor] = {}

    def step_options(self) -> dict[str, Any]:
        """Return the keywords for `forward_backward_step`."""
        objective = self.objective
        if not objective.replaces_loss:
            return {}
        return {"head": objective.head, "loss_fn": self, "whole_rows": objective.whole_rows}

    def __call__(self, outputs: Any, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
        loss, added = self.objective(outputs, labels, batch)
        for name, value in added.items():
            value = value.detach().double()  # many steps may add up
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        return loss

    def read(
        self, prefix: str, loss_group: dist.ProcessGroup | None, schedule: Any, n_context_ranks: int
    ) -> dict[str, float]:
        """Return the metrics of all ranks since the last call. Collective over all ranks."""
        if not self.objective.replaces_loss:
            return {}
        sums, self._sums = self._sums, {}
        for value in sums.values():
            if loss_group is not None:
                dist.all_reduce(value, group=loss_group)
            if self.objective.whole_rows:  # which all context-parallel ranks count
                value /= n_context_ranks
        if schedule is not None:
            sums = schedule.tree_from_last_stage(sums)
        return self.objective.metrics(sums, prefix) if sums else {}
