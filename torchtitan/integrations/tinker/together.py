"""Requests of several models in one batch: their samples' rows, losses, metrics and gradients apart.

B rows, T slots per row; the rows of a model are next to each other (`TrainingMicrobatch.models`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.integrations.tinker.states import TrainingState
from torchtitan.integrations.tinker.wire import ForwardBackwardRequest
from torchtitan.rl.losses import LossOutput, PolicyLoss, finalize_metrics


class Call(NamedTuple):
    """A request of a model whose state is not in the policy."""

    state: TrainingState
    request: ForwardBackwardRequest


_SUM = "sum"  # the metric that is a model's whole loss; no loss has a metric of this name


class LossesOfModels:
    """The losses of models, each on its model's rows; a `PolicyLoss` for `PolicyTrainer`.

    Metric "i/name" is metric "name" of model i, and "i/sum" its loss.
    """

    def __init__(self, losses: Sequence[PolicyLoss]):
        self._losses = list(losses)
        self.needs_whole_sequences = any(loss.needs_whole_sequences for loss in losses)
        self.needs_entropy = any(loss.needs_entropy for loss in losses)
        self.metric_names = tuple(
            f"{i}/{name}" for i, loss in enumerate(losses) for name in (_SUM, *loss.metric_names)
        )

    def check(self, batch: Mapping[str, Any]) -> None:
        for loss in self._losses:
            loss.check(batch)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Mapping[str, Any]
    ) -> LossOutput:
        nothing = logprobs.new_zeros(())
        metrics: dict[str, Any] = dict.fromkeys(self.metric_names, nothing)
        total = nothing
        for i, rows in _rows_of_models(batch.get("models") or [0] * len(logprobs)):
            own = {key: x[rows] for key, x in batch.items() if isinstance(x, Tensor)}
            own_entropy = None if entropy is None else entropy[rows]
            loss, of_model = self._losses[i](logprobs[rows], own_entropy, own)
            total = total + loss
            metrics |= {f"{i}/{name}": value for name, value in of_model.items()}
            metrics[f"{i}/{_SUM}"] = loss.detach()
        return LossOutput(total, metrics)

    def of_model(
        self, i: int, metrics: Mapping[str, float], num_tokens: int
    ) -> tuple[float, dict[str, float]]:
        """Return model i's loss and metrics, of sums over the batch. num_tokens: of its samples."""
        own = {name: metrics[f"{i}/{name}"] for name in self._losses[i].metric_names}
        return metrics[f"{i}/{_SUM}"], finalize_metrics(own, num_tokens)


def _rows_of_models(models: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each model and its rows. models: of the rows, ascending."""
    for model in sorted(set(models)):
        begin = models.index(model)
        yield model, slice(begin, begin + models.count(model))
