"""What `forward_step` and `forward_backward_step` of an engine do: check, pack, run, add up.

B sequences, T tokens, V vocabulary entries.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.batch import Batch, Microbatches, PackedBatch
from torchtitan.batch.fillers import zero_loss
from torchtitan.config.checks.common import has_token_loss, has_value_head
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.loss.cross_entropy import default_head
from torchtitan.step.runner import Head, Microbatch, on_error


def forward(
    engine: Any,
    microbatches: Microbatches,
    output_fn: Callable[[Any, Batch], Any] | None,
    head: Head | None,
) -> list[Any] | None:
    """See `TrainingEngine.forward_step`."""
    _check_outputs(engine, head)
    batches, is_single = _as_list(microbatches)
    packing = engine.packing
    if head is not None and (without := [x for x in batches if x.get("labels") is None]):
        raise ValueError(
            "forward_step with a head needs the batch's 'labels' [B, T], got "
            f"{sorted(without[0])}; put the token ids there whose log-probs are wanted, "
            "IGNORE_INDEX where none is"
        )
    batches = [packing.pack(x, None if head is None else x["labels"]) for x in batches]
    if head is not None:
        batches = [batch.with_token_labels(packing.vocab_size) for batch in batches]
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
    labels: Tensor | Sequence[Tensor | None] | None,
    global_valid_tokens: Tensor | float,
    loss_fn: Callable[[Any, Tensor, Batch], Tensor] | None,
    head: Head | None,
    whole_rows: bool = False,
) -> Tensor:
    """See `TrainingEngine.forward_backward_step`."""
    _check_outputs(engine, head, needs_logits=loss_fn is None and has_token_loss(engine.train_spec))
    batches, is_single = _as_list(input_dict)
    label_list = [labels] if isinstance(labels, Tensor | None) else list(labels)
    if len(batches) != len(label_list):
        raise ValueError(
            f"input_dict has {len(batches)} microbatches and labels {len(label_list)}; "
            "give one labels tensor per microbatch"
        )
    batches = list(map(engine.packing.pack, batches, label_list))
    if loss_fn is None or head is not None:  # what only a loss function sees may have any shape
        for batch in batches:
            if batch.labels is None:
                raise ValueError(
                    "the default loss and a head need labels [B, T], got None; give each token its "
                    "target, or a loss_fn that needs none"
                )
            batch.check_labels()
    if head is not None or (loss_fn is None and has_token_loss(engine.train_spec)):
        batches = [batch.with_token_labels(engine.packing.vocab_size) for batch in batches]
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
            if loss_fn is not None:
                return scalar_loss(loss_fn(logits, microbatch.labels, microbatch.batch))
            return logits if is_default else -logits.logprobs.sum()

        if loss_fn is None and head is None:  # may be collective
            loss = engine.loss_fn(logits, microbatch.labels)
        else:
            loss = engine.watch.attempt(compute, lambda: zero_loss(logits))
        return loss / global_valid_tokens

    with on_error(update.forget_microbatches):
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
        return loss


def check_trains(engine: Any, step: str) -> None:
    """Raises RuntimeError for an engine that only runs forwards."""
    if engine.forward_only:
        raise RuntimeError(
            f"{step} needs gradients and an optimizer, which this engine was built without; "
            "build it with forward_only=False"
        )


def scalar_loss(loss: Any) -> Tensor:
    """What a caller's loss_fn returned, as []. Raises ValueError if it has no gradients."""
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"one of shape {list(loss.shape)}"
            got += "" if loss.requires_grad else " without a gradient"
        raise ValueError(
            f"loss_fn must return a sum over tokens, a scalar tensor computed from the outputs, got "
            f"{got}; where no token counts, return the outputs' sum times 0"
        )
    return loss.reshape(())


def _check_outputs(engine: Any, head: Head | None, needs_logits: bool = False) -> None:
    """Here and not in the model, where the first stages of a pipeline would wait for the last."""
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


def _as_list(microbatches: Microbatches) -> tuple[list[Batch | PackedBatch], bool]:
    """The batches, and whether it was one by itself."""
    is_single = isinstance(microbatches, dict | PackedBatch)
    return [microbatches] if is_single else list(microbatches), is_single
