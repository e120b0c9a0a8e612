"""What `forward_step` and `forward_backward_step` of an engine do: check, pack, run, add up.

B sequences, T tokens, V vocabulary entries.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.batch import Batch, Microbatches, TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.batch.fillers import zero_loss
from torchtitan.config.checks.common import has_token_loss, has_value_head
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.loss.cross_entropy import default_head
from torchtitan.step.outputs import Reductions, StepMetrics, StepOutput
from torchtitan.step.runner import Head, Microbatch, on_error
from torchtitan.tools import host

Labels = Tensor | Sequence[Tensor | None] | None


def forward(
    engine: Any,
    microbatches: Microbatches,
    labels: Labels,
    output_fn: Callable[[Any, Any], Any] | None,
    head: Head | None,
) -> list[Any] | None:
    """See `TrainingEngine.forward_step`."""
    _check_outputs(engine, head)
    has_head = head is not None
    batches, is_single = _packed(engine, microbatches, labels, has_head, has_head)
    runner, watch = engine.runner, engine.watch
    n_fillers = runner.ask_num_fillers(len(batches), is_single)

    def output_of(logits: Any, microbatch: Microbatch) -> Any:
        logits = whole_tensor(logits)
        output = watch.attempt(
            lambda: output_fn(logits, microbatch.batch) if output_fn else logits, lambda: None
        )
        return output, microbatch.join

    outputs = runner.run(runner.microbatches(batches, head, n_fillers), output_of)
    # Only here do ranks wait for each other after the last function.
    watch.raise_failures(waits=True)
    # Collective under context parallelism, so none of the functions may have failed.
    return None if outputs is None else [join(output) for output, join in outputs]


def forward_backward(
    engine: Any,
    input_dict: Microbatches,
    labels: Labels,
    global_valid_tokens: Tensor | float | None,
    loss_fn: Callable[[Any, Tensor, Any], Any] | None,
    head: Head | None,
    whole_rows: bool = False,
    metrics: Reductions | None = None,
) -> Tensor | StepOutput:
    """See `TrainingEngine.forward_backward_step`."""
    _check_outputs(engine, head, needs_logits=loss_fn is None and has_token_loss(engine.train_spec))
    collected = None if metrics is None else StepMetrics(metrics, engine.device)
    batches, is_single = _packed(
        engine,
        input_dict,
        labels,
        needs_labels=loss_fn is None or head is not None,
        are_tokens=head is not None or (loss_fn is None and has_token_loss(engine.train_spec)),
    )
    if global_valid_tokens is None:
        if loss_fn is None:
            raise ValueError(
                "the loss without a loss_fn is a sum over tokens, and needs global_valid_tokens to "
                "divide it: give the valid tokens of all ranks and microbatches, or 1.0 and "
                "optim_step(denominator=...)"
            )
        global_valid_tokens = 1.0
    # One on an accelerator is not looked at, which would wait for it.
    on_device = isinstance(global_valid_tokens, Tensor) and global_valid_tokens.device.type != "cpu"
    if not on_device and not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )
    config, runner, update = engine.job_config, engine.runner, engine.update
    if engine.pp_schedule is not None and is_single:
        batches = batches[0].split(config.parallelism.pipeline_parallel_microbatch_size)

    n_fillers = runner.ask_num_fillers(len(batches), is_single)
    if config.optimizer.early_step_in_backward:
        update.prepare_early_step(len(batches) + n_fillers())
        engine.checkpointer.maybe_wait_for_staging()  # backward will change the weights

    # Of the ranks that share whole rows, each computes the same loss.
    is_joined = whole_rows and runner.sharding is not None
    is_default = loss_fn is None and head is None and not is_joined
    has_functions = not (loss_fn is None and head is None) or engine.pp_schedule is not None
    if is_default:
        head = default_head(engine.loss_fn, runner.model_parts, config.training.loss_chunk)

    def loss_of(logits: Tensor, microbatch: Microbatch) -> Tensor:
        if is_joined:
            logits = microbatch.join(whole_tensor(logits))
        elif loss_fn is not None:
            logits = whole_tensor(logits)

        def compute() -> Tensor:
            if loss_fn is None:
                return logits if is_default else -logits.logprobs.sum()
            returned = loss_fn(logits, microbatch.labels, microbatch.batch)
            if collected is not None:
                returned = collected.take(
                    returned, Microbatch.join if is_joined else microbatch.join
                )
            return scalar_loss(returned)

        if loss_fn is None and head is None:  # may be collective
            loss = engine.loss_fn(logits, microbatch.labels)
        else:
            loss = engine.watch.attempt(compute, lambda: zero_loss(logits))
        return loss / global_valid_tokens

    with on_error(update.forget_microbatches):
        update.had_backward = True
        microbatches = runner.microbatches(
            batches, head, n_fillers, reduce_with_last=True, whole_rows=whole_rows
        )
        losses = runner.run(microbatches, loss_of, backward=True)
        # In fp32, whatever the loss function gave: ranks without a loss have to match it.
        loss = torch.zeros((), device=engine.device)
        if losses:
            stacked = torch.stack(losses)
            update.losses.add(stacked, [batch.sample_ids for batch in batches])
            loss = stacked.sum(dtype=torch.float32)
            if is_joined:
                loss /= runner.sharding.mesh.size()
        if engine.pp_schedule is not None:
            # Only the rank of the last stage knows it, and all ranks log it.
            loss = engine.pp_schedule.broadcast_from_last_stage(loss)
        with on_error(runner.recover):
            engine.watch.raise_failures(waits=has_functions and not runner.backward_orders_ranks)
        if collected is None:
            return loss
        num_copies = runner.sharding.mesh.size() if is_joined else 1
        return collected.reduced(engine, loss, num_copies)


def prepare(engine: Any, batch: Batch, labels: Tensor | None, head: Head | None) -> Microbatch:
    """See `TrainingEngine.prepare`."""
    check_open(engine, "prepare")
    _check_own_forward(engine, "prepare")
    _check_outputs(engine, head)
    (packed,), _ = _packed(engine, batch, labels, head is not None, head is not None)
    return engine.runner.prepare(packed, head)


def backward(engine: Any, loss: Tensor) -> None:
    """See `TrainingEngine.backward`."""
    _check_own_forward(engine, "backward")
    loss, update = scalar_loss(loss, "backward must get"), engine.update
    if engine.job_config.optimizer.early_step_in_backward:
        update.prepare_early_step(1)
        engine.checkpointer.maybe_wait_for_staging()  # backward will change the weights
    with on_error(update.forget_microbatches):
        update.had_backward = True
        engine.runner.backward(loss)
        update.losses.add(loss.detach().reshape(1), [])


def check_open(engine: Any, step: str) -> None:
    """Raises RuntimeError for an engine that was closed."""
    if engine not in host.engines():
        raise RuntimeError(
            f"{step} was called after close(), which gives back what the engine needs; close it after "
            "the last step, or build a new one"
        )


def check_trains(engine: Any, step: str) -> None:
    """Raises RuntimeError for an engine that was closed, or only runs forwards."""
    check_open(engine, step)
    if engine.forward_only:
        raise RuntimeError(
            f"{step} needs gradients and an optimizer, which this engine was built without; "
            "build it with forward_only=False"
        )


def scalar_loss(loss: Any, must: str = "loss_fn must return") -> Tensor:
    """What a caller's loss_fn returned, as []. Raises ValueError if it has no gradients."""
    if isinstance(loss, tuple):
        raise ValueError(
            "loss_fn returned a tuple, and the call names no metrics: give it metrics={name: 'sum' "
            "or 'max'} of those in the second value, {} for none"
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


def _check_outputs(engine: Any, head: Head | None, needs_logits: bool = False) -> None:
    """Here and not in the model, where the first stages of a pipeline would wait for the last."""
    if isinstance(head, type) or not (head is None or callable(head)):
        got = f"the class {head.__name__}" if isinstance(head, type) else repr(head)
        raise ValueError(
            f"head must be an object that computes outputs, such as TokenLogProbs(), got {got}; give "
            "an instance of the head's class"
        )
    if not has_value_head(engine.job_config, engine.model_args):
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


def _check_own_forward(engine: Any, method: str) -> None:
    """Raises ValueError where the caller cannot call the model."""
    if engine.pp_schedule is not None:
        raise ValueError(
            f"{method} is for forwards of the caller's own, and the schedule of a pipeline "
            "(parallelism.pipeline_parallel_degree > 1) runs the model's: give "
            "forward_backward_step a loss_fn, or forward_step an output_fn"
        )


def _packed(
    engine: Any,
    microbatches: Microbatches,
    labels: Labels,
    needs_labels: bool,
    are_tokens: bool,
) -> tuple[list[TokenBatch], bool]:
    """The batches as values with their labels, and whether it was one by itself.

    needs_labels: False where only a loss function sees them: they may have any shape. are_tokens:
        they must be token ids.
    """
    is_single = isinstance(microbatches, dict | TokenBatch)
    batches = [microbatches] if is_single else list(microbatches)
    given = [labels] if isinstance(labels, Tensor) else list(labels or [None] * len(batches))
    if len(batches) != len(given):
        raise ValueError(
            f"there are {len(batches)} microbatches and labels for {len(given)}; give one labels "
            "tensor per microbatch, or each batch its own 'labels'"
        )
    packing, packed = engine.packing, []
    for batch, own in zip(batches, given, strict=True):
        if own is None and isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
            own = batch["labels"]
        packed.append(packing.pack(batch, own))
    for batch in packed if needs_labels else ():
        if batch.labels is None:
            raise ValueError(
                "the default loss and a head need labels [B, T], got None and a batch of "
                f"{sorted(batch.as_dict())}; give each token its target, {IGNORE_INDEX} where it has "
                "none, as labels= or as the batch's 'labels', or a loss_fn that needs none"
            )
        batch.check_labels()
    if are_tokens:
        packed = [batch.with_token_labels(packing.vocab_size) for batch in packed]
    return packed, is_single
