"""The objective of a data mixture, which also reports the tokens and the mean loss of each source."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs
from torchtitan.step.objective import Objective


class SourceLosses(Objective):
    """Cross entropy, also reported per source. "sources" [B, T] of the batch: the source index of each token."""

    replaces_loss = True

    def __init__(self, names: Sequence[str], compile_backend: str | None = None) -> None:
        self.head = TokenLogProbs(compile_backend=compile_backend)
        self._names = names

    def __call__(
        self, outputs: TokenOutputs, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = -outputs.logprobs
        sources = batch["sources"].flatten()

        def by_source(values: Tensor) -> Tensor:
            sums = torch.zeros(len(self._names), dtype=torch.float64, device=values.device)
            return sums.index_add_(0, sources, values.detach().flatten().double())

        return losses.sum(), {
            "loss": by_source(losses),
            "tokens": by_source(labels != IGNORE_INDEX),
        }

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        metrics = {}
        for name, loss, count in zip(
            self._names, sums["loss"].tolist(), sums["tokens"].tolist(), strict=True
        ):
            metrics[f"sources/{name}/tokens"] = count
            if count:
                metrics[f"sources/{name}/loss"] = loss / count
        return metrics

    @property
    def for_validation(self) -> Objective:
        return Objective()  # validation data have no sources
