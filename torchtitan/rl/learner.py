"""The base class of the policy and the critic: accumulates gradients, takes optimizer steps.

Every method is collective: all ranks call it with the same `TrainingBatch` and get the same result.

B rows, T slots of a microbatch (see `torchtitan.rl.types`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan.batch.batch import TokenBatch, check_ids
from torchtitan.distributed.processes.ranks import all_ranks, on_all_ranks
from torchtitan.engine import TrainingEngine
from torchtitan.rl.losses import check_context_parallel, finalize_metrics
from torchtitan.rl.types import (
    ForwardBackwardOutput,
    LossInputs,
    OptimParams,
    OptimStepOutput,
    TrainingBatch,
)
from torchtitan.step.runner import Head


class Pass(NamedTuple):
    """The results of a forward-backward pass of the current step, over all ranks.

    metrics: sums, or maxima for names that end in `_max`. denominator: as in `TrainingBatch`.
    """

    loss: float = 0.0
    metrics: dict[str, float] = {}
    num_tokens: int = 0
    advantages: Sequence[float] = ()
    denominator: float | None = None


class Learner(ABC):
    """Learns from batches of samples; the caller decides when to take an optimizer step.

    A token's score is the log-prob of its label (policy), or a value (critic).
    loss: the default loss of `forward_backward`. passes: the forward-backward passes of the current step.
    replays_experts: True if the routers use the experts that are recorded in the samples.
    """

    replays_experts: ClassVar[bool] = True

    def __init__(self, engine: TrainingEngine, loss: Any):
        self.engine, self.loss = engine, loss
        self.passes: tuple[Pass, ...] = ()

    @abstractmethod
    def _output_layer(self, loss_fn: Any = None) -> Head | None:
        """Return the head whose outputs `loss_fn` reads. Without `loss_fn`: the head that computes scores.

        None stands for the model's own output layer.
        """

    @abstractmethod
    def _values(self, outputs: Any) -> tuple:
        """Convert the head's outputs to the arguments that a loss takes before `batch`.

        The first argument is the scores [B, T].
        """

    # ---- one step ----

    def forward(self, batch: TrainingBatch, head: Head | None = None) -> list[Tensor | None]:
        """Return each sample's scores, a 1-D fp32 tensor on the CPU, without gradients.

        If samples share a slot, one sample gets the slot's score, and the other samples get 0. Log-probs
        outside the loss are 0. With the batcher's `scores_masked`, no score is set to 0. A sample that fits
        no row gets None.
        head: computes values [B, T, ...] that are returned instead of the scores.
        Raises ValueError as `forward_backward` does.
        """
        self._check_on_all_ranks(batch)
        return self._per_sample(batch, self._score(batch, head), only_own=head is None)

    def forward_backward(
        self, batch: TrainingBatch, loss_fn: Any = None, *, return_logprobs: bool = False
    ) -> ForwardBackwardOutput:
        """Add the gradients of the batch's loss to the accumulated gradients.

        loss_fn: a `PolicyLoss`; None takes `self.loss`.
        return_logprobs: also gather and return the scores.

        If the computation raises, the gradients of the whole step are zeroed, because they may include
        part of the batch. Before any computation, all ranks raise ValueError in these cases: the batch was
        made for a different number of data-parallel ranks; ranks have different numbers of samples or
        microbatches; a tensor that the loss reads is missing.
        """
        loss_fn = self.loss if loss_fn is None else loss_fn
        check_context_parallel(loss_fn, self.engine.parallel_dims.cp)
        if any((batch.denominator is None) != (x.denominator is None) for x in self.passes):
            raise ValueError(
                "one optimizer step got batches with and without Batcher.deferred; set deferred to the "
                "same value for all batches of a step, or call optim_step in between"
            )
        self._check_on_all_ranks(batch, loss_fn)

        def loss_of(outputs: Any, _labels: Tensor, batch: LossInputs) -> tuple:
            values = self._values(outputs)
            return *loss_fn(*values, batch), values[0] if return_logprobs else None

        try:
            batches = self._token_batches(batch)
            if teacher := getattr(loss_fn, "teacher", None):
                batches = teacher.prepare(batches)
            step = self.engine.forward_backward_step(
                input_dict=batches,
                # The loss is a weighted sum, which the engine does not divide by a number of tokens.
                loss_fn=loss_of,
                head=self._output_layer(loss_fn),
                metrics={
                    name: "max" if name.endswith("_max") else "sum" for name in loss_fn.metric_names
                },
            )
            loss, *values = torch.stack([step.loss, *step.metrics.values()]).tolist()
            done = Pass(
                loss,
                dict(zip(step.metrics, values, strict=True)),
                batch.num_measured_tokens,
                batch.sample_advantages(),
                batch.denominator,
            )
            logprobs = self._per_sample(batch, step.outputs) if return_logprobs else None
        except BaseException:
            self.zero_grad()
            raise
        self.passes += (done,)
        return ForwardBackwardOutput(loss, self._metrics_of([done]), logprobs)

    def optim_step(self, params: OptimParams | None = None) -> OptimStepOutput:
        """Clip gradients, update the weights, advance the schedule, and zero the gradients.

        params: settings for this step only. Raises ValueError if no `forward_backward` came before.
        """
        if not self.passes:
            raise ValueError("optim_step found no gradients; call forward_backward before it")
        params = OptimParams() if params is None else params
        shares = [x.denominator for x in self.passes if x.denominator is not None]
        denominator = sum(shares) if shares else None
        # `denominator` counts all ranks' samples. The engine sums it over ranks, so ranks after 0 pass 0.
        if shares and self.engine.dp_rank != 0:
            denominator = 0.0
        names = ("betas", "eps", "weight_decay")
        changes = {n: getattr(params, n) for n in names if getattr(params, n) is not None}
        groups = [group for optimizer in self.engine.optimizers for group in optimizer.param_groups]
        before = [{name: group[name] for name in changes} for group in groups]
        self.engine.step += 1
        try:
            for group in groups:
                group.update(changes)
            result = self.engine.optim_step(
                lr=params.lr, max_norm=params.max_norm, denominator=denominator
            )
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
        metrics = {"loss": sum(x.loss for x in self.passes), **self._metrics_of(self.passes)}
        self.passes = ()
        return OptimStepOutput(
            policy_version=self.engine.weights_version,
            grad_norm=result.grad_norm.item(),
            lr=result.lr,
            skipped=result.skipped,
            metrics=metrics,
        )

    def zero_grad(self) -> None:
        """Drop the gradients accumulated since the last step."""
        self.engine.optimizers.zero_grad()
        self.engine.update.forget_microbatches()
        self.passes = ()

    def close(self) -> None:
        """Finish pending checkpoint writes. Safe to call twice."""
        self.engine.close()

    # ---- helpers ----

    def _metrics_of(self, passes: Sequence[Pass]) -> dict[str, float]:
        """Return the metrics over all samples of these passes."""
        totals: dict[str, float] = {}
        for name, value in (pair for done in passes for pair in done.metrics.items()):
            before = totals.get(name, 0.0)
            totals[name] = max(before, value) if name.endswith("_max") else before + value
        return finalize_metrics(totals, sum(done.num_tokens for done in passes))

    def _check_on_all_ranks(self, batch: TrainingBatch, loss_fn: Any = None) -> None:
        """Raise ValueError on all ranks if any rank cannot use the batch. Collective: if only one rank
        raised, the other ranks would hang in the next collective.
        """
        dp_size, model = self.engine.dp_size, self.engine.model_parts[0]

        def check() -> tuple:
            for of_ranks in batch.microbatches:
                if len(of_ranks) != dp_size:
                    raise ValueError(
                        f"the batch was made for {len(of_ranks)} data-parallel ranks, got a "
                        f"trainer with {dp_size}; make it with Batcher(dp_size={dp_size})"
                    )
                for microbatch in of_ranks:
                    vocab_size = self.engine.model_args.vocab_size
                    inputs = microbatch.inputs
                    check_ids("the tokens of samples", inputs["input"], vocab_size)
                    check_ids("labels", inputs["labels"], vocab_size)
                    if self.replays_experts and "routed_experts" in inputs:
                        model.check_routed_experts(inputs["input"], inputs["routed_experts"])
                    if loss_fn is not None:
                        loss_fn.check(inputs)
            return len(batch.microbatches), batch.num_samples, batch.num_global_valid_tokens

        sizes = on_all_ranks(check)
        if len(set(sizes)) > 1:
            listed = "; ".join(
                f"rank {rank}: {n} microbatches of {samples} samples with {tokens} tokens"
                for rank, (n, samples, tokens) in enumerate(sizes[:8])
            )
            raise ValueError(f"all ranks must pass the same batch, got {listed}")

    def _token_batches(self, batch: TrainingBatch) -> list[TokenBatch]:
        """Return this rank's microbatches for the engine, marked so that it skips the check of token ids."""
        left_out = ("input",) if self.replays_experts else ("input", "routed_experts")
        found = []
        for inputs in (microbatch.inputs for microbatch in batch.of_rank(self.engine.dp_rank)):
            entries = {key: x for key, x in inputs.items() if key not in left_out}
            given = inputs["input"], inputs["labels"]
            found.append(TokenBatch(*given, entries=entries, has_checked_ids=True))
        return found

    def _score(self, batch: TrainingBatch, head: Head | None = None) -> list[Tensor] | None:
        """Return the scores [B, T] of this rank's microbatches; None on ranks without the last stage."""
        return self.engine.forward_step(
            self._token_batches(batch),
            output_fn=lambda outputs, _: outputs if head else self._values(outputs)[0],
            head=head or self._output_layer(),
        )

    def _per_sample(
        self, batch: TrainingBatch, scores: list[Tensor] | None, only_own: bool = True
    ) -> list[Tensor | None]:
        """Split [B, T] scores into one tensor per sample, and gather the samples of all ranks."""
        only_own = only_own and not batch.scores_masked
        samples: dict[int, Tensor] = {}
        found = self.engine.from_last_stage(scores)
        for microbatch, values in zip(batch.of_rank(self.engine.dp_rank), found, strict=True):
            samples |= microbatch.per_sample(values.float().cpu(), only_own=only_own)
        if self.engine.dp_group is not None:
            parts = all_ranks(samples, self.engine.dp_group)
            samples = {index: values for part in parts for index, values in part.items()}
        return [samples.get(index) for index in range(batch.num_samples)]
