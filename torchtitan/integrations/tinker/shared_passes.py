"""Runs requests of several LoRA models in one batch, with separate losses, metrics and gradients.

B rows, T slots per row; the rows of a model are adjacent (`LossInputs.models`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.adapters.multi_lora import MultiLoRA
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.conversions import (
    check_finite,
    error_or,
    finite_output,
    loss_of,
    only_targets,
    output_of,
)
from torchtitan.integrations.tinker.local_sampling import on_thread
from torchtitan.integrations.tinker.states import TrainingState
from torchtitan.integrations.tinker.types import ForwardBackwardOutput
from torchtitan.integrations.tinker.wire import ForwardBackwardRequest
from torchtitan.rl.losses import LossOutput, PolicyLoss, finalize_metrics
from torchtitan.rl.types import LossInputs, TrainingBatch, TrainingSample


class Call(NamedTuple):
    """A request of a model, and the model's state, which must not be in the policy."""

    state: TrainingState
    request: ForwardBackwardRequest


_SUM = "sum"  # name of the metric with a model's loss; no loss uses this name


class LossesOfModels:
    """A `PolicyLoss` that applies each model's loss to the model's rows, and returns the sum.

    Metric "i/name" is metric "name" of model i; "i/sum" is the loss of model i.
    """

    def __init__(self, losses: Sequence[PolicyLoss]):
        self._losses = list(losses)
        self.needs_whole_sequences = any(loss.needs_whole_sequences for loss in losses)
        self.needs_entropy = any(loss.needs_entropy for loss in losses)
        self.metric_names = tuple(
            f"{i}/{name}" for i, loss in enumerate(losses) for name in (_SUM, *loss.metric_names)
        )

    def check(self, batch: LossInputs) -> None:
        for loss in self._losses:
            loss.check(batch)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: LossInputs) -> LossOutput:
        total = logprobs.new_zeros(())
        metrics: dict[str, Any] = dict.fromkeys(self.metric_names, total)
        models = batch.get("models") or [0] * len(logprobs)  # ascending
        for i in sorted(set(models)):
            begin = models.index(i)
            rows = slice(begin, begin + models.count(i))
            own: Any = {key: x[rows] for key, x in batch.items() if isinstance(x, Tensor)}
            own_entropy = None if entropy is None else entropy[rows]
            loss, of_model = self._losses[i](logprobs[rows], own_entropy, own)
            total = total + loss
            metrics |= {f"{i}/{name}": value for name, value in of_model.items()}
            metrics[f"{i}/{_SUM}"] = loss.detach()
        return LossOutput(total, metrics)

    def of_model(
        self, i: int, metrics: Mapping[str, float], num_tokens: int
    ) -> tuple[float, dict[str, float]]:
        """Return model i's loss and metrics. metrics: sums over the batch. num_tokens: of model i."""
        own = {name: metrics[f"{i}/{name}"] for name in self._losses[i].metric_names}
        return metrics[f"{i}/{_SUM}"], finalize_metrics(own, num_tokens)


_Prepared = tuple[PolicyLoss, list[TrainingSample]]


class SharedPasses:
    """Runs calls of several models with adapters in one pass over the base, on the client's thread.

    The models' states must not be in the policy; see `LocalTrainingClient.exchange_state`.
    """

    def __init__(self, client: LocalTrainingClient):
        engine = client._trainer.engine
        self._client, self._thread = client, client._thread
        dims = engine.parallel_dims
        has_ddp = dims.dp_replicate_enabled and not (dims.uses_fsdp or dims.pp_enabled)
        self._adapters = MultiLoRA(engine.model_parts, engine.loss_group, has_ddp)

    @on_thread
    def run(self, calls: Sequence[Call]) -> list[ForwardBackwardOutput | Exception]:
        """Return, for each call, the result or exception of `forward_backward` or `forward`.

        calls: either all are forward-only or none is. A model may have several calls.
        """
        results: list[Any] = [error_or(lambda c=call: self._prepared(c)) for call in calls]
        good = [n for n, result in enumerate(results) if not isinstance(result, Exception)]
        if good:
            run = self._forward if calls[0].request.forward_only else self._forward_backward
            found = run([calls[n].state for n in good], [results[n] for n in good])
            for number, result in zip(good, found, strict=True):
                results[number] = result
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, Exception) and not call.request.forward_only:
                call.state.failure = call.state.failure or result
        return results

    def _prepared(self, call: Call) -> _Prepared:
        """Return the loss and the samples of a call. Raises ValueError for data that cannot be used."""
        request = call.request
        if request.problem is not None:
            raise ValueError(request.problem)
        loss, data = loss_of(request.loss_fn, request.loss_fn_config), request.data
        if not request.forward_only:
            return loss, self._client.samples(data, loss)
        return loss, self._client.samples([only_targets(datum) for datum in data])

    def _forward(self, states: Sequence[TrainingState], prepared: Sequence[_Prepared]) -> list[Any]:
        with self._adapters_of(states, prepared, trains=False) as (batch, _):
            logprobs = iter(self._client._trainer.forward(batch))
        own = [[next(logprobs) for _ in samples] for _, samples in prepared]
        return [error_or(lambda x=x: output_of(check_finite(x), {})) for x in own]

    def _forward_backward(
        self, states: Sequence[TrainingState], prepared: Sequence[_Prepared]
    ) -> list[Any]:
        trainer, loss = self._client._trainer, LossesOfModels([loss for loss, _ in prepared])
        try:
            with self._adapters_of(states, prepared, trains=True) as (batch, gradients):
                output = trainer.forward_backward(batch, loss, return_logprobs=True)
        finally:
            trainer.zero_grad()  # the gradients belong to the states, not to the policy
        logprobs = iter(output.logprobs)
        results = []
        for i, (state, (_, samples)) in enumerate(zip(states, prepared, strict=True)):
            own = [next(logprobs) for _ in samples]
            numbers = loss.of_model(i, output.metrics, int(sum(x.loss_mask.sum() for x in samples)))
            results.append(error_or(lambda o=own, n=numbers: finite_output(o, *n)))
            if not isinstance(results[-1], Exception):
                state.add_gradients(gradients[i])
        return results

    @contextlib.contextmanager
    def _adapters_of(
        self, states: Sequence[TrainingState], prepared: Sequence[_Prepared], trains: bool
    ) -> Iterator[tuple[TrainingBatch, list[dict[str, Tensor]]]]:
        """Yield (batch of all samples, list). Inside, each row uses the adapters of its model. If
        `trains`, the list holds each model's gradients after the context."""
        adapters, runner = self._adapters, self._client._trainer.engine.runner
        samples = [sample for _, own in prepared for sample in own]
        models = [i for i, (_, own) in enumerate(prepared) for _ in own]
        batch = self._client._batcher.batch(samples, models)
        batch = replace(batch, num_measured_tokens=1)  # keeps metrics as sums; see `of_model`
        runner.around = lambda mb: adapters.set_rows(mb.batch.get("models") or [0] * len(mb.inputs))
        try:
            with adapters.adapters([state.weights for state in states], trains) as gradients:
                yield batch, gradients
        finally:
            runner.around = None
