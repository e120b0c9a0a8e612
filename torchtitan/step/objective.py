"""What a trainer minimizes: a head, a loss of its outputs, and the count that divides the loss.

B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.step.runner import Head, Runner


class Objective:
    """Base class of objectives; the base class itself uses the train spec's loss.

    head, whole_rows: see `TrainingEngine.forward_backward_step`.
    """

    replaces_loss = False  # True in subclasses that define `__call__`
    head: Head[Any] | None = None
    whole_rows = False

    def denominator(self, batch: TokenBatch) -> int:
        """Return what a CPU batch adds to the loss denominator. Called in the thread that reads batches."""
        return batch.num_valid

    def prepare(self, batches: Sequence[TokenBatch]) -> Sequence[TokenBatch]:
        """Return the batches with added outputs of another model, such as a teacher. Collective."""
        return batches

    def __call__(
        self, outputs: Any, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (a microbatch's loss, name -> a tensor of any shape that is summed for the metrics)."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        """Return metrics from the sums over ranks and microbatches. prefix: put before each name."""
        return {}

    @property
    def for_validation(self) -> "Objective":
        return self

    def close(self) -> None:
        """Close the engine of a second model, such as a teacher, if the objective has one."""


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
            value = value.detach().double()  # fp64, because the sum may be over many steps
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        return loss

    def read(
        self, prefix: str, runner: Runner, loss_group: dist.ProcessGroup | None
    ) -> dict[str, float]:
        """Return the metrics of all ranks since the last call. Collective over all ranks."""
        sums, self._sums = self._sums, {}
        for value in sums.values():
            if loss_group is not None:
                dist.all_reduce(value, group=loss_group)
            if self.objective.whole_rows:  # every context-parallel rank counted the same rows
                value /= runner.num_context_ranks
        if runner.schedule is not None and self.objective.replaces_loss:
            sums = runner.schedule.tree_from_last_stage(sums)
        return self.objective.metrics(sums, prefix) if sums else {}
