"""Forward and backward calls of a step: check the caller's batches, run the model, add up the losses.

`TrainingEngine` makes a `Step` from the engine's parts for each call. The `Runner` prepares and runs
microbatches; `LossOfOutputs` computes losses from the model's outputs.

B sequences, T tokens, V vocabulary entries, cp context-parallel ranks.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import Batch, Microbatches, TokenBatch
from torchtitan.batch.dummy_microbatches import num_dummies, zero_loss
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config import JobConfig
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.loss.cross_entropy import LossFunction, default_head
from torchtitan.step.outputs import Reductions, StepMetrics, StepOutput
from torchtitan.step.runner import Head, Microbatch, Runner, on_error
from torchtitan.step.update import Update

Labels = Tensor | Sequence[Tensor | None] | None
CallersLoss = Callable[[Any, Tensor, Any], Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """Runs an engine's forward and backward calls. The fields are parts of the engine.

    loss_fn: the train spec's loss, for calls without loss_fn and head. loss_group: the ranks over which
        losses are summed.
    has_token_loss: True if `loss_fn` takes logits, and labels that are token ids.
    """

    config: JobConfig
    policy: DocumentPolicy
    runner: Runner
    update: Update
    loss_fn: LossFunction
    has_token_loss: bool
    loss_group: dist.ProcessGroup | None

    def forward(
        self,
        microbatches: Microbatches,
        labels: Labels,
        output_fn: Callable[[Any, Any], Any] | None,
        head: Head | None,
    ) -> list[Any] | None:
        """See `TrainingEngine.forward_step`."""
        runner = self.runner
        batches, is_single = self._read(microbatches, labels, head)
        # A caller that passes a single batch does so on every rank, so no rank needs dummies.
        n_dummies = num_dummies(len(batches), None if is_single else runner.dp_group, runner.device)

        def output_of(logits: Any, microbatch: Microbatch) -> Any:
            logits = whole_tensor(logits)
            output = runner.watch.attempt(
                lambda: output_fn(logits, microbatch.batch) if output_fn else logits, lambda: None
            )
            return output, microbatch.join

        outputs = runner.run(runner.microbatches(batches, self.policy, head, n_dummies), output_of)
        # No collective follows the last output_fn, so the ranks have to wait for each other here.
        runner.watch.raise_failures()
        # After `raise_failures`, because joining is collective: a failed rank would not take part.
        return None if outputs is None else [join(output) for output, join in outputs]

    def forward_backward(
        self,
        input_dict: Microbatches,
        labels: Labels,
        global_valid_tokens: Tensor | float | None,
        loss_fn: CallersLoss | None,
        head: Head | None,
        whole_rows: bool = False,
        metrics: Reductions | None = None,
    ) -> Tensor | StepOutput:
        """See `TrainingEngine.forward_backward_step`."""
        runner, update = self.runner, self.update
        batches, is_single = self._read(input_dict, labels, head, loss_fn is None)
        denominator = loss_denominator(global_valid_tokens, is_required=loss_fn is None)
        loss_of = LossOfOutputs(self, loss_fn, head, whole_rows, metrics, denominator)
        batches, n_dummies = self._split(batches, is_single)
        if self.config.optimizer.early_step_in_backward:
            update.prepare_early_step(len(batches) + n_dummies())
        with on_error(update.forget_microbatches):
            update.had_backward = True
            options = {"reduce_with_last": True, "whole_rows": whole_rows}
            microbatches = runner.microbatches(
                batches, self.policy, loss_of.model_head, n_dummies, **options
            )
            losses = runner.run(microbatches, loss_of, backward=True)
            loss = self._sum_of_call(losses, batches) / loss_of.n_copies
            if loss_of.may_fail:
                with on_error(runner.recover):
                    runner.watch.raise_failures()
            return loss if loss_of.metrics is None else loss_of.metrics.reduced(loss)

    def prepare(self, batch: Batch, labels: Tensor | None, head: Head | None) -> Microbatch:
        """See `TrainingEngine.prepare`."""
        self._check_own_forward("prepare")
        (checked,), _ = self._read(batch, labels, head)
        return self.runner.prepare(checked, self.policy, head)

    def backward(self, loss: Tensor) -> None:
        """See `TrainingEngine.backward`."""
        self._check_own_forward("backward")
        loss, update = scalar_loss(loss, "backward must get"), self.update
        if self.config.optimizer.early_step_in_backward:
            update.prepare_early_step(1)
        with on_error(update.forget_microbatches):
            update.had_backward = True
            self.runner.backward(loss)
            update.losses.add(loss.detach().reshape(1), [None])

    def _split(
        self, batches: list[TokenBatch], is_single: bool
    ) -> tuple[list[TokenBatch], Callable[[], int]]:
        """Return a call's microbatches, and a function that returns how many dummies follow them."""
        parallelism, runner = self.config.parallelism, self.runner
        if runner.schedule is not None and is_single:
            batches = batches[0].split(parallelism.pipeline_parallel_microbatch_size)
        # A pipeline may have split single batches into unequal numbers of microbatches. Ranks need equal
        # numbers only if FSDP gathers weights for each microbatch.
        gathers_each = parallelism.fsdp_reshard_after_forward == "always"
        is_equal = is_single and not (runner.schedule is not None and gathers_each)
        group = None if is_equal else runner.dp_group
        return batches, num_dummies(len(batches), group, runner.device)

    def _sum_of_call(self, losses: list[Any] | None, batches: list[TokenBatch]) -> Tensor:
        """Return the sum of a call's losses on all pipeline ranks; add the losses to `update.losses`."""
        # fp32 for every loss function: pipeline ranks without a loss receive this dtype by broadcast.
        loss = torch.zeros((), device=self.runner.device)
        if losses:
            stacked = torch.stack(losses)
            self.update.losses.add(stacked, [batch.sample_ids for batch in batches])
            loss = stacked.sum(dtype=torch.float32)
        schedule = self.runner.schedule
        return loss if schedule is None else schedule.broadcast_from_last_stage(loss)

    # ---- checks, before the model runs: an error in a pipeline's last stage leaves other stages waiting ----

    def _read(
        self,
        microbatches: Microbatches,
        labels: Labels,
        head: Head | None,
        has_default_loss: bool = False,
    ) -> tuple[list[TokenBatch], bool]:
        """Return (batches with their labels, True if the caller gave a single batch and no list)."""
        policy, model = self.policy, self.runner.model_parts[0]
        needs_logits = has_default_loss and self.has_token_loss
        check_head(self.runner, head, needs_logits)
        is_single = isinstance(microbatches, dict | TokenBatch)
        given = [microbatches] if is_single else list(microbatches)
        if labels is None:
            labels = [None] * len(given)
        labels = [labels] if isinstance(labels, Tensor) else list(labels)
        if len(given) != len(labels):
            raise ValueError(
                f"got {len(given)} microbatches, but labels for {len(labels)}; pass one labels tensor "
                "per microbatch, or put 'labels' into each batch"
            )
        batches = []
        for batch, own in zip(given, labels, strict=True):
            if own is None and isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
                own = batch["labels"]
            batch = policy.token_batch(batch, own)
            if has_default_loss or head is not None:
                batch.check_labels()
            if needs_logits or head is not None:
                batch = batch.with_token_labels(policy.vocab_size)
            experts = batch.entries.get("routed_experts")
            if experts is not None and not batch.has_checked_ids:
                if hasattr(model, "check_routed_experts"):
                    model.check_routed_experts(batch.tokens, experts)
            batches.append(batch)
        return batches, is_single

    def _check_own_forward(self, method: str) -> None:
        if self.runner.schedule is not None:
            raise ValueError(
                f"{method} needs a forward that the caller runs, but with parallelism."
                "pipeline_parallel_degree > 1 the pipeline's schedule runs the model's forward; call "
                "forward_backward_step with a loss_fn, or forward_step with an output_fn, instead"
            )


class LossOfOutputs:
    """Computes a microbatch's loss from the model's outputs, for one `forward_backward_step`.

    model_head: the head that the model computes in place of logits, from the caller or `default_head`;
        None if the model returns logits.
    may_fail: the call runs a caller's function, which may fail on some ranks. Under a pipeline a caller
        may pass the function on the last stage's ranks only, so every rank assumes that it was passed.
    """

    def __init__(
        self,
        step: Step,
        loss_fn: CallersLoss | None,
        head: Head | None,
        whole_rows: bool,
        metrics: Reductions | None,
        denominator: Tensor | float,
    ):
        runner, is_default = step.runner, loss_fn is None and head is None
        self._step, self._loss_fn, self._denominator = step, loss_fn, denominator
        self._joins_rows = whole_rows and runner.sharding is not None
        # The number of ranks that each compute the whole loss of the same rows.
        self.n_copies = runner.num_context_ranks if whole_rows else 1
        self.metrics = None
        if metrics is not None:
            self.metrics = StepMetrics(metrics, runner, step.loss_group, self.n_copies)
        self.may_fail = not is_default or runner.schedule is not None
        self.model_head = head
        if is_default and not self._joins_rows:
            self.model_head = default_head(step.loss_fn, runner.model_parts, step.config)
        self._model_has_loss = is_default and self.model_head is not None

    def __call__(self, outputs: Any, microbatch: Microbatch) -> Tensor:
        """Return the microbatch's loss, divided by the call's `global_valid_tokens`."""
        if self._joins_rows:
            outputs = microbatch.join(whole_tensor(outputs))
        elif self._loss_fn is not None:
            outputs = whole_tensor(outputs)
        if self._loss_fn is None and self.model_head is None:
            # Not in `attempt`: the loss of sharded logits is collective, so every rank must compute it.
            loss = self._step.loss_fn(outputs, microbatch.labels)
        else:
            loss = self._step.runner.watch.attempt(
                lambda: self._sum(outputs, microbatch), lambda: zero_loss(outputs)
            )
        return loss / self._denominator

    def _sum(self, outputs: Any, microbatch: Microbatch) -> Tensor:
        if self._model_has_loss:
            return outputs
        if self._loss_fn is None:
            return -outputs.logprobs.sum()
        returned = self._loss_fn(outputs, microbatch.labels, microbatch.batch)
        if self.metrics is not None:
            # With whole rows the outputs are joined already; `Microbatch.join` returns its argument.
            join = Microbatch.join if self._joins_rows else microbatch.join
            returned = self.metrics.take(returned, join)
        return scalar_loss(returned)


def loss_denominator(
    global_valid_tokens: Tensor | float | None, is_required: bool
) -> Tensor | float:
    """Return the denominator of a call's loss: global_valid_tokens, or 1 if it is None.

    Raises ValueError if a required count is None, and if a count is not above 0 and finite. A count on an
    accelerator is not checked, because reading it waits for the device.
    """
    if global_valid_tokens is None:
        if is_required:
            raise ValueError(
                "the loss without a loss_fn is a sum over tokens, which global_valid_tokens divides: "
                "pass the number of valid tokens of all microbatches, summed over the data-parallel "
                "ranks; or pass 1.0 here, and the number as optim_step(denominator=...)"
            )
        return 1.0
    on_device = isinstance(global_valid_tokens, Tensor) and global_valid_tokens.device.type != "cpu"
    if not on_device and not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )
    return global_valid_tokens


def check_head(runner: Runner, head: Head | None, needs_logits: bool) -> None:
    """Raise ValueError if the head is a class or is not callable.

    For a model with a value head, also raise ValueError for any head, and if logits are needed.
    """
    if isinstance(head, type) or not (head is None or callable(head)):
        raise ValueError(
            f"head must be an object that computes outputs, such as TokenLogProbs(), got {head!r}; give "
            "an instance of the head's class"
        )
    if runner.has_value_head and (head is not None or needs_logits):
        raise ValueError(
            "a model with a value head gives values [B, T, 1], and no logits for a head or the default "
            "loss; leave head out, and give a loss_fn(values, labels, batch)"
        )


def scalar_loss(loss: Any, must: str = "loss_fn must return") -> Tensor:
    """Return a caller's loss as a tensor of shape [].

    must: the first words of the error message. Raises ValueError unless the loss is a scalar with a gradient.
    """
    if isinstance(loss, tuple):
        raise ValueError(
            "loss_fn returned a tuple, but the call has no metrics argument; pass metrics={name: "
            "'sum' or 'max'} for the metrics in the tuple's second value, or {} for none"
        )
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"one of shape {list(loss.shape)}"
            got += "" if loss.requires_grad else " without a gradient"
        raise ValueError(
            f"{must} a sum over tokens, a scalar tensor computed from the outputs, got "
            f"{got}; for a microbatch without valid tokens, return outputs.sum() * 0"
        )
    return loss.reshape(())
