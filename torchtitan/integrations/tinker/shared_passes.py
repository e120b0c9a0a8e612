"""Runs requests of several LoRA models in one batch, with separate losses, metrics and gradients.

B rows, T slots per row; the rows of a model are adjacent (`LossInputs.models`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.adapters.multi_lora import MultiLoRA
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.conversions import (
    error_or,
    loss_of,
    only_targets,
    output_of,
)
from torchtitan.integrations.tinker.local_sampling import on_thread
from torchtitan.integrations.tinker.states import TrainingState
from torchtitan.integrations.tinker.types import ForwardBackwardOutput
from torchtitan.integrations.tinker.wire import ForwardBackwardRequest
from torchtitan.rl.losses import LossOutput, PolicyLoss, finalize_metrics
from torchtitan.rl.types import LossInputs, TrainingSample


class Call(NamedTuple):
    """A request for a model, and the model's state, which must not be swapped into the policy."""

    state: TrainingState
    request: ForwardBackwardRequest


# Name of the metric that holds a model's loss; no loss has its own metric of this name.
_SUM = "sum"


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
        # The rows of a model are adjacent.
        models = batch.get("models") or [0] * len(logprobs)
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

    def of_model(self, i: int, metrics: Mapping[str, float], num_tokens: int) -> dict[str, float]:
        """Return model i's metrics. metrics: sums over the batch. num_tokens: number of its loss tokens."""
        own = {name: metrics[f"{i}/{name}"] for name in self._losses[i].metric_names}
        return {"loss:sum": metrics[f"{i}/{_SUM}"], **finalize_metrics(own, num_tokens)}


class _Share(NamedTuple):
    """A call's loss, samples and model state in a shared pass."""

    state: TrainingState
    loss: PolicyLoss
    samples: list[TrainingSample]


class SharedPasses:
    """Runs calls of several models with adapters in one pass over the base, on the client's thread.

    The models' states must not be swapped into the policy; see `LocalTrainingClient.exchange_state`.
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
        trains = any(not call.request.forward_only for call in calls)
        prepared = [error_or(self._prepared, call) for call in calls]
        pairs = zip(calls, prepared, strict=True)
        shares = [_Share(call.state, *x) for call, x in pairs if not isinstance(x, Exception)]
        outputs = iter(self._run(shares, trains) if shares else ())
        results = [x if isinstance(x, Exception) else next(outputs) for x in prepared]
        for call, result in zip(calls, results, strict=True):
            if trains and isinstance(result, Exception):
                call.state.failure = call.state.failure or result
        return results

    def _prepared(self, call: Call) -> tuple[PolicyLoss, list[TrainingSample]]:
        """Return the loss and the samples of a call. Raises ValueError for data that cannot be used."""
        request = call.request
        if request.problem is not None:
            raise ValueError(request.problem)
        loss, data = loss_of(request.loss_fn, request.loss_fn_config), request.data
        if not request.forward_only:
            return loss, self._client.samples(data, loss)
        return loss, self._client.samples([only_targets(datum) for datum in data])

    def _run(
        self, shares: Sequence[_Share], trains: bool
    ) -> list[ForwardBackwardOutput | Exception]:
        trainer, loss = self._client._trainer, LossesOfModels([share.loss for share in shares])
        samples = [sample for share in shares for sample in share.samples]
        models = [i for i, share in enumerate(shares) for _ in share.samples]
        batch = self._client._batcher.batch(samples, models)
        # Metrics stay sums here; `of_model` divides them.
        batch = replace(batch, num_measured_tokens=1)
        adapters, runner = self._adapters, trainer.engine.runner
        runner.around = lambda mb: adapters.set_rows(mb.batch.get("models") or [0] * len(mb.inputs))
        metrics: Mapping[str, float] = {}
        try:
            with adapters.adapters([share.state.weights for share in shares], trains) as gradients:
                if trains:
                    done = trainer.forward_backward(batch, loss, return_logprobs=True)
                    logprobs, metrics = iter(done.logprobs), done.metrics
                else:
                    logprobs = iter(trainer.forward(batch))
        finally:
            runner.around = None
            if trains:
                # The models' states get the gradients; the policy's own gradients must stay 0.
                trainer.zero_grad()
        results = []
        for i, share in enumerate(shares):
            num_tokens = sum(int(sample.loss_mask.sum()) for sample in share.samples)
            of_model = loss.of_model(i, metrics, num_tokens) if trains else {}
            results.append(error_or(output_of, [next(logprobs) for _ in share.samples], of_model))
            if trains and not isinstance(results[-1], Exception):
                share.state.add_gradients(gradients[i])
        return results
