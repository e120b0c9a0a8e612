"""Metrics of a data mixture: the tokens and the mean loss of each source."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs


class SourceLosses:
    """A loss function that also accumulates the loss of each source between logs.

    Pass `head` to the same step; the batch needs "sources" [B, T], the index of each token's source.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, compile_backend: str | None = None
    ) -> None:
        self.head = TokenLogProbs(compile_backend=compile_backend)
        self._names = names
        # [2, number of sources]: this rank's sum of losses and number of labels.
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=device)

    def __call__(self, outputs: TokenOutputs, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
        losses = -outputs.logprobs
        counted = torch.stack([losses.detach(), labels != IGNORE_INDEX]).flatten(1).double()
        self._sums.index_add_(1, batch["sources"].flatten(), counted)
        return losses.sum()

    def read(self, loss_group: dist.ProcessGroup | None, schedule: Any | None) -> dict[str, float]:
        """Return the metrics of all ranks since the last call. Collective over all ranks."""
        sums = self._sums.clone()
        self._sums.zero_()
        if loss_group is not None:
            dist.all_reduce(sums, group=loss_group)
        if schedule is not None:
            sums = schedule.broadcast_from_last_stage(sums)
        losses, counts = sums.tolist()
        metrics = {}
        for name, loss, count in zip(self._names, losses, counts, strict=True):
            metrics[f"sources/{name}/tokens"] = count
            if count:
                metrics[f"sources/{name}/loss"] = loss / count
        return metrics
