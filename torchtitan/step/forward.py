"""The calls of one step: check the caller's batches, run them, and add up the losses.

`forward` and `forward_backward` are what `TrainingEngine.forward_step` and `forward_backward_step`
do. They check the caller's batches, and under a pipeline `forward_backward` splits a single batch by
rows. The `Runner` prepares and runs the microbatches; `LossOfOutputs` makes losses of their outputs.

B sequences, T tokens, V vocabulary entries, cp context-parallel ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import Batch, Microbatches, TokenBatch
from torchtitan.batch.documents import (
    IGNORE_INDEX,
)
from torchtitan.batch.fillers import num_fillers, zero_loss
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config import JobConfig
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.loss.cross_entropy import LossFunction, default_head
from torchtitan.step.outputs import Reductions, StepMetrics, StepOutput
from torchtitan.step.runner import Head, Microbatch, Runner, on_error
from torchtitan.step.update import Update

Labels = Tensor | Sequence[Tensor | None] | None


class Engine(Protocol):
    """The parts of a `TrainingEngine` that a forward or backward uses."""

    job_config: JobConfig
    loss_fn: LossFunction
    has_token_loss: bool
    runner: "Runner"
    update: Update

    @property
    def packing(self) -> DocumentPolicy: ...

    @property
    def loss_group(self) -> dist.ProcessGroup | None: ...


# ---- the two kinds of call ----


def forward(
    engine: Engine,
    microbatches: Microbatches,
    labels: Labels,
    output_fn: Callable[[Any, Any], Any] | None,
    head: Head | None,
) -> list[Any] | None:
    """See `TrainingEngine.forward_step`."""
    runner = engine.runner
    check_head(runner, head)
    batches, is_single = read_batches(engine, microbatches, labels, head is not None)
    # If the caller gave a single batch, every rank has a single batch and needs no fillers.
    n_fillers = num_fillers(len(batches), None if is_single else runner.dp_group, runner.device)

    def output_of(logits: Any, microbatch: Microbatch) -> Any:
        logits = whole_tensor(logits)
        output = runner.watch.attempt(
            lambda: output_fn(logits, microbatch.batch) if output_fn else logits, lambda: None
        )
        return output, microbatch.join

    microbatches = runner.microbatches(batches, engine.packing, head, n_fillers)
    outputs = runner.run(microbatches, output_of)
    # No collective follows the last output_fn, so the ranks have to wait for each other here.
    runner.watch.raise_failures(waits=True)
    # Joining is collective, so no rank may have failed before it.
    return None if outputs is None else [join(output) for output, join in outputs]


def forward_backward(
    engine: Engine,
    input_dict: Microbatches,
    labels: Labels,
    global_valid_tokens: Tensor | float | None,
    loss_fn: Callable[[Any, Tensor, Any], Any] | None,
    head: Head | None,
    whole_rows: bool = False,
    metrics: Reductions | None = None,
) -> Tensor | StepOutput:
    """See `TrainingEngine.forward_backward_step`."""
    runner, update = engine.runner, engine.update
    needs_logits = loss_fn is None and engine.has_token_loss
    check_head(runner, head, needs_logits)
    are_tokens = head is not None or needs_logits
    batches, is_single = read_batches(
        engine, input_dict, labels, are_tokens, needs_labels=loss_fn is None
    )
    denominator = loss_denominator(global_valid_tokens, is_required=loss_fn is None)
    loss_of = LossOfOutputs(engine, loss_fn, head, whole_rows, metrics, denominator)
    batches, n_fillers = _microbatches_of_call(engine, batches, is_single)
    if engine.job_config.optimizer.early_step_in_backward:
        update.prepare_early_step(len(batches) + n_fillers())
    with on_error(update.forget_microbatches):
        update.had_backward = True
        # A generator: `run` has each microbatch prepared when it takes it; a pipeline takes all at once.
        microbatches = runner.microbatches(
            batches,
            engine.packing,
            loss_of.model_head,
            n_fillers,
            reduce_with_last=True,
            whole_rows=whole_rows,
        )
        losses = runner.run(microbatches, loss_of, backward=True)
        # fp32 whatever dtype the loss function returns: ranks without a loss have to match it.
        loss = torch.zeros((), device=runner.device)
        if losses:
            stacked = torch.stack(losses)
            update.losses.add(stacked, [batch.sample_ids for batch in batches])
            loss = stacked.sum(dtype=torch.float32) / loss_of.n_copies
        if runner.schedule is not None:
            # Only the rank of the last stage has the loss, and all ranks log it.
            loss = runner.schedule.broadcast_from_last_stage(loss)
        with on_error(runner.recover):
            waits = loss_of.may_fail and not runner.backward_orders_ranks
            runner.watch.raise_failures(waits=waits)
        return loss if metrics is None else loss_of.reduced(loss)


def _microbatches_of_call(
    engine: Engine, batches: list[TokenBatch], is_single: bool
) -> tuple[list[TokenBatch], Callable[[], int]]:
    """Return a call's microbatches, and a function that returns how many fillers follow them."""
    parallelism, runner = engine.job_config.parallelism, engine.runner
    if runner.schedule is not None and is_single:
        batches = batches[0].split(parallelism.pipeline_parallel_microbatch_size)
    # As in `forward`, single batches need no fillers. A pipeline, however, may have split the batches
    # of data-parallel ranks into unequal numbers of microbatches, which matters only if FSDP gathers
    # weights for each microbatch.
    gathers_each = parallelism.fsdp_reshard_after_forward == "always"
    is_equal = is_single and not (runner.schedule is not None and gathers_each)
    group = None if is_equal else runner.dp_group
    return batches, num_fillers(len(batches), group, runner.device)


def loss_denominator(
    global_valid_tokens: Tensor | float | None, is_required: bool
) -> Tensor | float:
    """Return what a call's loss is divided by: 1 if it is not given.

    Raises ValueError if it is required, or on the host and not above 0 and finite.
    """
    if global_valid_tokens is None:
        if is_required:
            raise ValueError(
                "the loss without a loss_fn is a sum over tokens, and needs global_valid_tokens to "
                "divide it: give the valid tokens of all microbatches, summed over the "
                "data-parallel ranks, or 1.0 and optim_step(denominator=...)"
            )
        return 1.0
    # A count on an accelerator is not checked, because reading it waits for the device.
    on_device = isinstance(global_valid_tokens, Tensor) and global_valid_tokens.device.type != "cpu"
    if not on_device and not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )
    return global_valid_tokens


class LossOfOutputs:
    """Makes a microbatch's loss of the model's outputs, for one `forward_backward_step`.

    model_head: computed by the model in place of logits: the caller's head, or the default loss where
        it needs no logits; None for logits.
    n_copies: the ranks that each compute the whole loss of the same rows.
    may_fail: the call runs a caller's function, which may fail on some ranks. Under a pipeline a caller
        may give it on the last stage's ranks only, so every rank expects one.
    """

    def __init__(
        self,
        engine: Engine,
        loss_fn: Callable[[Any, Tensor, Any], Any] | None,
        head: Head | None,
        whole_rows: bool,
        metrics: Reductions | None,
        denominator: Tensor | float,
    ):
        self._engine, self._runner = engine, engine.runner
        self._loss_fn, self._denominator = loss_fn, denominator
        self._metrics = None if metrics is None else StepMetrics(metrics, self._runner.device)
        sharding = self._runner.sharding
        self._joins_rows = whole_rows and sharding is not None
        self.n_copies = sharding.mesh.size() if self._joins_rows else 1
        self.may_fail = not (loss_fn is None and head is None) or self._runner.schedule is not None
        self.model_head = head
        self._model_has_loss = False
        if loss_fn is None and head is None and not self._joins_rows:
            parts, config = self._runner.model_parts, engine.job_config
            self.model_head = default_head(engine.loss_fn, parts, config)
            self._model_has_loss = self.model_head is not None

    def __call__(self, outputs: Any, microbatch: "Microbatch") -> Tensor:
        """Return the microbatch's loss, divided by the denominator."""
        if self._joins_rows:
            outputs = microbatch.join(whole_tensor(outputs))
        elif self._loss_fn is not None:
            outputs = whole_tensor(outputs)
        if self._loss_fn is None and self.model_head is None:
            # Not by `attempt`: on logits split over ranks it is collective, so all ranks must run it.
            loss = self._engine.loss_fn(outputs, microbatch.labels)
        else:
            loss = self._runner.watch.attempt(
                lambda: self._sum(outputs, microbatch), lambda: zero_loss(outputs)
            )
        return loss / self._denominator

    def _sum(self, outputs: Any, microbatch: "Microbatch") -> Tensor:
        if self._model_has_loss:
            return outputs
        if self._loss_fn is None:
            return -outputs.logprobs.sum()
        returned = self._loss_fn(outputs, microbatch.labels, microbatch.batch)
        if self._metrics is not None:
            # The default of `join` changes nothing: whole rows are joined already.
            join = Microbatch.join if self._joins_rows else microbatch.join
            returned = self._metrics.take(returned, join)
        return scalar_loss(returned)

    def reduced(self, loss: Tensor) -> StepOutput:
        """Return the loss and the metrics of the global batch; collective."""
        assert self._metrics is not None
        runner, group = self._runner, self._engine.loss_group
        return self._metrics.reduced(
            loss, self.n_copies, group, runner.schedule, runner.has_outputs
        )


def prepare(engine: Engine, batch: Batch, labels: Tensor | None, head: Head | None) -> Microbatch:
    """See `TrainingEngine.prepare`."""
    check_own_forward(engine.runner, "prepare")
    check_head(engine.runner, head)
    (checked,), _ = read_batches(engine, batch, labels, head is not None)
    return engine.runner.prepare(checked, engine.packing, head)


def backward(engine: Engine, loss: Tensor) -> None:
    """See `TrainingEngine.backward`."""
    check_own_forward(engine.runner, "backward")
    loss, update = scalar_loss(loss, "backward must get"), engine.update
    if engine.job_config.optimizer.early_step_in_backward:
        update.prepare_early_step(1)
    with on_error(update.forget_microbatches):
        update.had_backward = True
        engine.runner.backward(loss)
        update.losses.add(loss.detach().reshape(1), [None])


# ---- checks ----


def read_batches(
    engine: Engine,
    microbatches: Microbatches,
    labels: Labels,
    are_tokens: bool,
    needs_labels: bool = False,
) -> tuple[list[TokenBatch], bool]:
    """(the caller's batches with their labels, True if the caller gave one batch and no list).

    are_tokens: there must be labels that are token ids. needs_labels: there must be labels. Without
        both, only a loss_fn sees the labels, which may have any shape.
    """
    policy, model = engine.packing, engine.runner.model_parts[0]
    is_single = isinstance(microbatches, dict | TokenBatch)
    given = [microbatches] if is_single else list(microbatches)
    labels = [labels] if isinstance(labels, Tensor) else list(labels or [None] * len(given))
    if len(given) != len(labels):
        raise ValueError(
            f"there are {len(given)} microbatches and labels for {len(labels)}; give one labels "
            "tensor per microbatch, or each batch its own 'labels'"
        )
    batches = []
    for batch, own in zip(given, labels, strict=True):
        if own is None and isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
            own = batch["labels"]
        batches.append(policy.token_batch(batch, own))
    for batch in batches if needs_labels or are_tokens else ():
        if batch.labels is None:
            raise ValueError(
                "the default loss and a head need labels [B, T], got None and a batch of "
                f"{sorted(batch.as_dict())}; give each token its target, {IGNORE_INDEX} where it has "
                "none, as labels= or as the batch's 'labels', or a loss_fn that needs none"
            )
        batch.check_labels()
    if are_tokens:
        batches = [batch.with_token_labels(policy.vocab_size) for batch in batches]
    for batch in batches if hasattr(model, "check_routed_experts") else ():
        routed_experts = batch.entries.get("routed_experts")
        if routed_experts is not None:
            model.check_routed_experts(batch.tokens, routed_experts)
    return batches, is_single


def check_head(runner: "Runner", head: Head | None, needs_logits: bool = False) -> None:
    """Raise ValueError for a head that the model cannot use, and for a loss that needs logits which
    the model does not have.

    Checked before the model runs, because an error on the last stage of a pipeline would leave the
    first stages waiting.
    """
    if isinstance(head, type) or not (head is None or callable(head)):
        got = f"the class {head.__name__}" if isinstance(head, type) else repr(head)
        raise ValueError(
            f"head must be an object that computes outputs, such as TokenLogProbs(), got {got}; give "
            "an instance of the head's class"
        )
    if not runner.has_value_head:
        return
    if head is not None:
        raise ValueError(
            "a model with a value head has no output projection for a head to compute from; leave "
            "head out: outputs are values [B, T, 1]"
        )
    if needs_logits:
        raise ValueError(
            "a model with a value head gives values [B, T, 1], and the default loss needs logits; "
            "give a loss_fn(values, labels, batch)"
        )


def check_own_forward(runner: "Runner", method: str) -> None:
    """Raise ValueError under a pipeline, where a caller cannot call the model."""
    if runner.schedule is not None:
        raise ValueError(
            f"{method} is for forwards of the caller's own, and the schedule of a pipeline "
            "(parallelism.pipeline_parallel_degree > 1) runs the model's: give "
            "forward_backward_step a loss_fn, or forward_step an output_fn"
        )


def scalar_loss(loss: Any, must: str = "loss_fn must return") -> Tensor:
    """Return a caller's loss as [].

    must: how the error begins. Raises ValueError for a loss that is not a scalar with a gradient.
    """
    if isinstance(loss, tuple):
        raise ValueError(
            "loss_fn returned a tuple, and the call names no metrics: give it metrics={name: 'sum' "
            "or 'max'} for the metrics in its second value, {} for none"
        )
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"one of shape {list(loss.shape)}"
            got += "" if loss.requires_grad else " without a gradient"
        raise ValueError(
            f"{must} a sum over tokens, a scalar tensor computed from the outputs, got "
            f"{got}; where no token counts, return the outputs' sum times 0"
        )
    return loss.reshape(())
