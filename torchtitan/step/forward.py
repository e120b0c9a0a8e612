"""Forwards and backwards of one step, in the order of events: check, prepare, run, add up.

`forward` and `forward_backward` are what `TrainingEngine.forward_step` and `forward_backward_step`
do. They check the caller's batches, and under a pipeline `forward_backward` splits a single batch by
rows. They make a `Microbatch` of each (`Runner.prepare`), call the model on it, locally or through a
pipeline schedule (`Runner.run`), and add up the losses.

B sequences, T tokens, V vocabulary entries, cp context-parallel ranks.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import distributed
from torchtitan.batch.batch import Batch, Entries, Microbatches, TokenBatch
from torchtitan.batch.context import ContextSharding, join_outputs, shard_batch
from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    positions_from_document_ids,
    warn_of_restarts,
)
from torchtitan.batch.fillers import num_fillers, without_counting, zero_loss
from torchtitan.batch.mask import shards_of
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config import JobConfig
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.processes.failure_watch import Watch
from torchtitan.loss.cross_entropy import LossFunction, default_head
from torchtitan.step.outputs import Reductions, StepMetrics, StepOutput
from torchtitan.step.update import Update
from torchtitan.tools.host_copy import on_host, to_device
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import keywords_of

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

Labels = Tensor | Sequence[Tensor | None] | None
Outputs = TypeVar("Outputs", covariant=True)


class Head(Protocol[Outputs]):
    """Computes outputs from hidden states in place of logits; see `loss.logprobs`.

    If the output projection has an adapter, the head is also called with `low_rank`, which adds the
    adapter's part to logits: `low_rank.add_to(logits)`.
    """

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> Outputs: ...


class ModelInputs(NamedTuple):
    """Arguments of the model's forward for one batch, and the labels for the loss and the head.

    extra_inputs: the batch's other entries, positions among them. extra_kwargs: more keywords, the
        attention masks among them. Under context parallelism all hold this rank's tokens, [B, T/cp],
        and the positions are in extra_kwargs.
    """

    inputs: Tensor  # [B, T]
    labels: Tensor | None  # [B, T]
    extra_inputs: Entries
    extra_kwargs: Entries


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """One batch of a call, or under a pipeline some of its rows, on the model's device.

    inputs, kwargs: arguments of the model's forward. labels: [B, T], or None. batch: the caller's
        entries, for loss and output functions. Under context parallelism all hold this rank's tokens,
        [B, T/cp].
    join: turns outputs for this rank's tokens into outputs for whole rows; collective.
    is_filler: this rank runs it only because other ranks have more microbatches.
    reduces_gradients: True for the last microbatch of a call; gradients of the earlier ones may wait
        and be reduced with it. Ignored under a pipeline, see `PipelineSchedule.step`.
    """

    inputs: Tensor
    kwargs: Entries
    labels: Tensor | None
    batch: Entries
    join: Callable[[Any], Any] = lambda outputs: outputs
    is_filler: bool = False
    reduces_gradients: bool = True


OnOutput = Callable[[Any, Microbatch], Any]


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

    outputs = runner.run(runner.microbatches(batches, head, n_fillers), output_of)
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
    config, runner, update = engine.job_config, engine.runner, engine.update
    needs_logits = loss_fn is None and engine.has_token_loss
    check_head(runner, head, needs_logits)
    collected = None if metrics is None else StepMetrics(metrics, runner.device)
    are_tokens = head is not None or needs_logits
    batches, is_single = read_batches(
        engine, input_dict, labels, are_tokens, needs_labels=loss_fn is None
    )
    if global_valid_tokens is None:
        if loss_fn is None:
            raise ValueError(
                "the loss without a loss_fn is a sum over tokens, and needs global_valid_tokens to "
                "divide it: give the valid tokens of all microbatches, summed over the "
                "data-parallel ranks, or 1.0 and optim_step(denominator=...)"
            )
        global_valid_tokens = 1.0
    # A count on an accelerator is not checked, because reading it waits for the device.
    on_device = isinstance(global_valid_tokens, Tensor) and global_valid_tokens.device.type != "cpu"
    if not on_device and not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )
    if runner.schedule is not None and is_single:
        batches = batches[0].split(config.parallelism.pipeline_parallel_microbatch_size)
    # As in `forward_step`, single batches need no fillers. A pipeline, however, may have split the batches
    # of data-parallel ranks into unequal numbers of microbatches, which matters only if FSDP gathers
    # weights for each microbatch.
    gathers_each = config.parallelism.fsdp_reshard_after_forward == "always"
    is_equal = is_single and not (runner.schedule is not None and gathers_each)
    n_fillers = num_fillers(len(batches), None if is_equal else runner.dp_group, runner.device)
    if config.optimizer.early_step_in_backward:
        update.prepare_early_step(len(batches) + n_fillers())

    # All ranks that share the rows then compute the same loss.
    joins_rows = whole_rows and runner.sharding is not None
    is_default = loss_fn is None and head is None and not joins_rows
    # Functions of the caller may fail. Under a pipeline a caller may give them on the last stage's
    # ranks only, so every rank has to expect them.
    has_functions = not (loss_fn is None and head is None) or runner.schedule is not None
    model_head = head
    if is_default:  # None if the engine's loss is computed from logits
        model_head = default_head(engine.loss_fn, runner.model_parts, config)

    def loss_of(outputs: Any, microbatch: Microbatch) -> Tensor:
        if joins_rows:
            outputs = microbatch.join(whole_tensor(outputs))
        elif loss_fn is not None:
            outputs = whole_tensor(outputs)

        def compute() -> Tensor:
            if loss_fn is None:
                # The outputs of the default head are the summed loss already.
                return outputs if is_default else -outputs.logprobs.sum()
            returned = loss_fn(outputs, microbatch.labels, microbatch.batch)
            if collected is not None:
                # The default of `join` changes nothing: these outputs are joined already.
                join = Microbatch.join if joins_rows else microbatch.join
                returned = collected.take(returned, join)
            return scalar_loss(returned)

        # Not by `attempt`: on logits split over ranks this loss is collective, so all ranks must run it.
        if loss_fn is None and model_head is None:
            loss = engine.loss_fn(outputs, microbatch.labels)
        else:
            loss = runner.watch.attempt(compute, lambda: zero_loss(outputs))
        return loss / global_valid_tokens

    with on_error(update.forget_microbatches):
        update.had_backward = True
        # A generator: `run` has each microbatch prepared when it takes it; a pipeline takes all at once.
        microbatches = runner.microbatches(
            batches, model_head, n_fillers, reduce_with_last=True, whole_rows=whole_rows
        )
        losses = runner.run(microbatches, loss_of, backward=True)
        # fp32 whatever dtype the loss function returns: ranks without a loss have to match it.
        loss = torch.zeros((), device=runner.device)
        if losses:
            stacked = torch.stack(losses)
            update.losses.add(stacked, [batch.sample_ids for batch in batches])
            loss = stacked.sum(dtype=torch.float32)
            if joins_rows:
                loss /= runner.sharding.mesh.size()
        if runner.schedule is not None:
            # Only the rank of the last stage has the loss, and all ranks log it.
            loss = runner.schedule.broadcast_from_last_stage(loss)
        with on_error(runner.recover):
            runner.watch.raise_failures(waits=has_functions and not runner.backward_orders_ranks)
        if collected is None:
            return loss
        num_copies = runner.sharding.mesh.size() if joins_rows else 1
        return collected.reduced(
            loss, num_copies, engine.loss_group, runner.schedule, runner.has_outputs
        )


def prepare(engine: Engine, batch: Batch, labels: Tensor | None, head: Head | None) -> Microbatch:
    """See `TrainingEngine.prepare`."""
    check_own_forward(engine.runner, "prepare")
    check_head(engine.runner, head)
    (checked,), _ = read_batches(engine, batch, labels, head is not None)
    return engine.runner.prepare(checked, head)


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
    labels = (
        [labels]
        if isinstance(labels, Tensor)
        else list([None] * len(given) if labels is None else labels)
    )
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


# ---- the model's inputs ----


def model_inputs(
    policy: DocumentPolicy,
    batch: TokenBatch,
    model: Any,
    tokenizer: Any,
    sharding: ContextSharding | None = None,
) -> ModelInputs:
    """Return the arguments of the model's forward for a batch.

    Entries that only tell documents apart are left out. A padding mask [B, T] becomes the kernel's mask.
    Unless attn_type is "sdpa" or the batch has masks, attention masks are added, and also positions that
    restart in each document, if document ids are known, `training.restart_positions` is set and the
    batch has no positions.
    """
    entries, device = dict(batch.entries), batch.tokens.device
    masks: Entries = {}
    if isinstance(entries.get("attention_masks"), Tensor):
        padding_mask = entries.pop("attention_masks")
        masks["attention_masks"] = model.get_padding_masks(padding_mask)
    elif policy.attn_type != "sdpa" and "attention_masks" not in entries:
        # Clients' models override get_attention_masks, as in torchtitan 0.2.x: it takes a dict of the
        # batch's entries, and returns the mask in the kernel's form. Therefore the ids go back into a
        # dict here, and `Decoder.forward` makes a `DocumentMask` of the kernel's form.
        for_masks = dict(entries)
        if batch.document_ids is not None:
            # The ids are known already: leave out all other sources, so that read_document_ids does
            # not compare them again.
            for key in (*BOUNDARY_KEYS, "positions"):
                for_masks.pop(key, None)
            for_masks["document_ids"] = batch.document_ids
            if policy.restart_positions and "positions" not in entries:
                restarted = positions_from_document_ids(on_host(batch.document_ids))
                entries["positions"] = to_device(restarted, device)
        masks["attention_masks"] = model.get_attention_masks(
            input_batch=batch.tokens, tokenizer=tokenizer, extra_inputs=for_masks
        )
    from_loader = batch.sample_ids is not None  # its rows always have document ids
    for key in BOUNDARY_KEYS:
        is_given = entries.pop(key, None) is not None
        if is_given and not from_loader and not policy.separates_documents:
            warn_once(
                logger,
                f"the batch's {key!r} keep no documents apart under model.attn_mask_type = "
                "'causal'; set it to 'block_causal' or 'position_block_causal', with "
                "model.attn_type 'flex' or 'varlen'",
            )
    positions = entries.get("positions")
    if not policy.separates_documents and "attention_masks" not in batch.entries:
        if isinstance(positions, Tensor) and positions.dim() == 2:
            warn_of_restarts(positions)
    inputs = ModelInputs(batch.tokens, batch.labels, entries, masks)
    return inputs if sharding is None else ModelInputs(*sharding.shard(*inputs))


# ---- the model ----


@dataclasses.dataclass
class Runner:
    """Calls the model on microbatches, in the contexts that the job wants.

    model_parts: the model, or this rank's stages of a pipeline.
    device: where batches are copied to, and where the model is.
    model_inputs: returns the model's inputs for a batch on the device. The engine passes its method
        `TrainingEngine.model_inputs`, which calls `post_dataloading_process`. Clients of 0.2.x override
        that method; its default calls the function `model_inputs` of this module.
    train_context, amp: contexts around every forward; train_context is around backward, too.
    sharding: cuts rows for the context-parallel ranks; None without context parallelism.
    schedule: the pipeline's schedule; None without pipeline parallelism.
    has_outputs: this rank gets the model's outputs: not on a pipeline's earlier stages.
    has_value_head: outputs are values [B, T, 1], and the model takes no head.
    defers_reduction: gradients are reduced with the last microbatch of a step. Without it, only
        the sum over the replicas of HSDP waits.
    has_replicas: ranks hold copies of the model or of its shards, as under DDP and HSDP.
    keeps_weights: FSDP keeps gathered weights after a forward; between deferred microbatches it keeps
        them after a backward, too.
    gradient_factor: multiplies losses before backward; always 1 under a pipeline. It is above 1 if
        gradients are averaged over ranks for a client's own backward, and undoes that for the engine's
        losses.
    watch: has a failure in a caller's function raise on all ranks.
    dp_group: the ranks that read different batches; None if all ranks read the same.
    filler: makes the batch that these ranks run to keep step with each other.
    around: makes a further context of each microbatch's forward, and of its backward; None for none.
    more_follow: further calls come before the optimizer step; see `more_microbatches_follow`.
    """

    model_parts: list[nn.Module]
    device: torch.device
    model_inputs: Callable[[TokenBatch], ModelInputs]
    train_context: Callable[[], contextlib.AbstractContextManager[None]]
    amp: contextlib.AbstractContextManager[None]
    sharding: ContextSharding | None = None
    schedule: "PipelineSchedule | None" = None
    has_outputs: bool = True
    has_value_head: bool = False
    defers_reduction: bool = False
    has_replicas: bool = False
    keeps_weights: bool = False
    gradient_factor: float = 1.0
    watch: Watch = dataclasses.field(default_factory=Watch)
    dp_group: dist.ProcessGroup | None = None
    filler: Callable[[], TokenBatch] | None = None
    around: "Callable[[Microbatch], contextlib.AbstractContextManager[None]] | None" = None
    more_follow: bool = dataclasses.field(default=False, init=False)

    # ---- before the model ----

    def prepare(
        self, batch: TokenBatch, head: Head | None = None, whole_rows: bool = False
    ) -> Microbatch:
        """Return a batch as the model and the loss get it.

        head: computes outputs in place of logits; it is called with the batch's labels.
        whole_rows: under context parallelism `labels` and `batch` keep whole rows.
        """
        whole = batch
        if self.sharding is not None:
            batch = self.sharding.pad(batch)
        batch = batch.to(self.device)
        inputs, labels, extra_inputs, extra_kwargs = self.model_inputs(batch)
        kwargs = extra_inputs | extra_kwargs
        names, takes_any = keywords_of(self.model_parts[0].forward)
        if not takes_any:
            kwargs = {key: value for key, value in kwargs.items() if key in names}
        join: dict[str, Any] = {}
        if self.sharding is None:
            entries = batch.as_dict()
        else:
            shards, n_tokens = shards_of(kwargs["attention_masks"]), inputs.shape[1]
            unlabeled = dataclasses.replace(batch, labels=None, document_ids=None)
            entries = shard_batch(unlabeled, shards).as_dict()
            join["join"] = functools.partial(
                join_outputs, shards=shards, n_tokens=n_tokens, seq_len=whole.tokens.shape[1]
            )
        keeps_rows = whole_rows and self.sharding is not None
        if head is not None:
            if reads_batch := getattr(head, "with_batch", None):
                head = reads_batch(entries)
            kwargs["head"] = functools.partial(head, labels=labels)
            # With whole rows the ranks join the heads' outputs, so no rank may put a 0 in place of its own.
            if not keeps_rows:
                kwargs["head"] = functools.partial(self._attempt_head, kwargs["head"])
        if keeps_rows:
            whole = whole.to(self.device)
            labels, entries = whole.labels, whole.as_dict()
        return Microbatch(inputs, kwargs, labels, entries, **join)

    def _attempt_head(
        self,
        head: Head,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **adapter: Any,
    ) -> Any:
        """Return the head's outputs, or a scalar 0 if a caller's function failed earlier in this call;
        see `FailureWatch`."""

        def compute() -> Any:
            return head(h, weight, bias, group=group, **adapter)

        if group is not None:  # the tensor-parallel ranks compute it together
            return compute()
        return self.watch.attempt(compute, lambda: zero_loss((h, weight, bias, adapter)))

    def microbatches(
        self,
        batches: Sequence[TokenBatch],
        head: Head | None,
        n_fillers: Callable[[], int],
        reduce_with_last: bool = False,
        whole_rows: bool = False,
    ) -> Iterator[Microbatch]:
        """Prepare one microbatch after the other, then fillers until all ranks are done.

        n_fillers: returns how many fillers this rank needs; see `batch.fillers.num_fillers`.
        reduce_with_last: only the very last of them reduces gradients. whole_rows: see `prepare`.
        """
        defers = reduce_with_last and self.defers_reduction
        for i, batch in enumerate(batches):
            microbatch = self.prepare(batch, head, whole_rows)
            is_last = i + 1 == len(batches)
            # n_fillers waits for the device: called last, and only if it makes a difference.
            if not is_last or (defers and n_fillers()):
                microbatch = dataclasses.replace(microbatch, reduces_gradients=False)
            yield microbatch
        if n := n_fillers():
            filler = dataclasses.replace(self.prepare(self.filler()), is_filler=True)
            for i in range(n):
                yield dataclasses.replace(filler, reduces_gradients=i + 1 == n)

    # ---- the model ----

    def run(
        self,
        microbatches: Iterable[Microbatch],
        on_output: OnOutput,
        *,
        backward: bool = False,
    ) -> list[Any] | None:
        """Call on_output(logits, microbatch) for each microbatch but fillers, and return its results.

        microbatches: taken one at a time; a pipeline takes all of them first.
        backward: on_output returns a loss, whose gradients are accumulated; the results are detached.
        None on pipeline ranks without the last stage. If this fails, the model can be called again,
        except inside a pipeline schedule: there any failure loses the engine, unless it is a failure of a
        caller's function.
        """
        with on_error(self.recover):
            if self.schedule is not None:
                outputs = self._run_schedule(list(microbatches), on_output, backward)
            else:
                outputs = []
                run_one = self._forward_backward if backward else self._forward
                for microbatch in microbatches:
                    output = run_one(microbatch, on_output)
                    if not microbatch.is_filler:
                        outputs.append(output)
        if not backward:
            # FSDP keeps the last unit gathered, and its gathered parameters would get the gradients.
            self.reshard()
        return outputs

    def _forward(self, microbatch: Microbatch, on_output: OnOutput) -> Any:
        (model,) = self.model_parts
        with self._around(microbatch), self.train_context(), self.amp:
            logits = model(microbatch.inputs, **microbatch.kwargs)
            return None if microbatch.is_filler else on_output(logits, microbatch)

    def _forward_backward(self, microbatch: Microbatch, on_output: OnOutput) -> Tensor:
        (model,) = self.model_parts
        with self._around(microbatch), self._deferring(microbatch), self.train_context():
            with self.amp:
                logits = model(microbatch.inputs, **microbatch.kwargs)
                loss = zero_loss(logits) if microbatch.is_filler else on_output(logits, microbatch)
            del logits  # [B, T, V]: free before backward needs the memory
            (loss * self.gradient_factor).backward()
        return loss.detach()

    def _run_schedule(
        self, microbatches: Sequence[Microbatch], on_output: OnOutput, backward: bool
    ) -> list[Any] | None:
        def call(logits: Any, microbatch: Microbatch) -> Any:
            if not microbatch.is_filler:
                return on_output(logits, microbatch)
            return zero_loss(logits) if backward else None

        # On the last stage the schedule calls loss_fn(output, target) for each microbatch. The target is the
        # Microbatch itself, so that `call` runs on_output. The schedule puts the results into `outputs`, those
        # of calls without backward too.
        outputs: list[Any] = []
        inputs = {
            "arg_mbs": [(microbatch.inputs,) for microbatch in microbatches],
            "kwarg_mbs": [microbatch.kwargs for microbatch in microbatches],
            "input_shapes": [tuple(microbatch.inputs.shape[:2]) for microbatch in microbatches],
            "target_mbs": microbatches,
            "losses": outputs,
            "loss_fn": call,
            "return_outputs": False,
        }
        if microbatches:
            # Sends between stages are not counted, so ranks cannot tell whether they failed at the same
            # point. If this block fails, the flag stays False and the engine is lost; see `failure_watch`.
            self.watch.counts_collectives = False
            with self.train_context(), self.amp:
                run = self.schedule.step if backward else self.schedule.eval
                run(
                    **inputs, context_mbs=[functools.partial(self._around, x) for x in microbatches]
                )
            self.watch.counts_collectives = True
        if not self.has_outputs:
            return None
        outputs = [x for x, mb in zip(outputs, microbatches, strict=True) if not mb.is_filler]
        return [loss.detach() for loss in outputs] if backward else outputs

    def backward(self, loss: Tensor) -> None:
        """Run backward of a caller's own forward. If this fails, the model can be called again."""
        with on_error(self.recover), self.train_context():
            (loss * self.gradient_factor).backward()

    @property
    def backward_orders_ranks(self) -> bool:
        """True if a backward on this rank cannot end before all ranks have called their last loss_fn.

        Then the ranks need not wait for each other to learn whether a loss_fn has failed. False on an
        accelerator, where the host does not wait for the collectives of backward.
        """
        if self.device.type != "cpu":
            return False
        if self.schedule is None and self.more_follow:
            return not (self.defers_reduction or self.has_replicas)
        if self.schedule is None and self.dp_group is None and self.sharding is None:
            # Tensor parallelism only: nothing is reduced, and backward communicates
            # down to the first layer that has gradients.
            blocks = getattr(self.model_parts[0], "layers", None)
            first = next(iter(blocks.values()), None) if blocks else None
            return first is not None and any(p.requires_grad for p in first.parameters())
        return True

    # ---- around a microbatch ----

    @contextlib.contextmanager
    def _around(self, microbatch: Microbatch) -> Iterator[None]:
        """The context of a microbatch: `around`; and in a filler experts count no tokens."""
        counting_parts = self.model_parts if microbatch.is_filler else []
        around = self.around(microbatch) if self.around else contextlib.nullcontext()
        with without_counting(counting_parts), around:
            yield

    @contextlib.contextmanager
    def more_microbatches_follow(self) -> Iterator[None]:
        """A context for calls that are not the last ones before the optimizer step; their gradients
        may wait. Ignored under a pipeline, see `PipelineSchedule.step`."""
        before, self.more_follow = self.more_follow, True
        try:
            yield
        finally:
            self.more_follow = before

    @contextlib.contextmanager
    def _deferring(self, microbatch: Microbatch) -> Iterator[None]:
        """Have the gradients computed inside reduced with a later microbatch's, if the job wants it."""
        later = self.more_follow or not microbatch.reduces_gradients
        # Without training.defer_gradient_sync only the sum over HSDP's replicas waits, and only in
        # the trainer's own loop.
        is_cheap = self.more_follow and self.has_replicas
        if not (later and (self.defers_reduction or is_cheap)):
            yield
            return
        (model,) = self.model_parts
        options = {"whole": self.defers_reduction, "keeps_weights": self.keeps_weights}
        distributed.reduce_later(model, True, **options)
        try:
            yield
        finally:
            distributed.reduce_later(model, False, **options)

    # ---- the model's state ----

    def mode(self, training: bool) -> contextlib.ExitStack:
        """Set training or evaluation mode at once; leaving the stack restores every module's mode."""
        modules = [module for part in self.model_parts for module in part.modules()]
        modes = [module.training for module in modules]

        def restore() -> None:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

        for part in self.model_parts:
            part.train(training)
        stack = contextlib.ExitStack()
        stack.callback(restore)
        return stack

    @functools.cached_property
    def _has_fsdp(self) -> bool:
        """True if FSDP holds parameters of the model. Kept, because walking over all modules costs 1 %
        of a small step."""
        modules = (module for part in self.model_parts for module in part.modules())
        return any(isinstance(module, distributed.FSDPModule) for module in modules)

    def recover(self) -> None:
        """Make the model ready for its next forward after a failure.

        Drops gathered weights, and gradients that were not reduced yet.
        """
        for part in self.model_parts:
            distributed.recover_model(part)

    def reshard(self) -> None:
        """Free the weights that FSDP has gathered, also those of a client's own forward."""
        if self._has_fsdp:
            for part in self.model_parts:
                distributed.reshard_model(part)

    def bytes_to_keep_gathered(self) -> int:
        """Extra bytes that this rank would hold if forwards kept the weights that FSDP gathers."""
        return sum(map(distributed.bytes_to_keep_gathered, self.model_parts))

    def keep_gathered(self) -> contextlib.ExitStack:
        """Inside, FSDP gathers weights in the first forward only; frees them at the end."""
        stack = contextlib.ExitStack()
        for part in self.model_parts:
            stack.enter_context(distributed.keep_gathered(part))
        return stack


@contextlib.contextmanager
def on_error(repair: Callable[[], None]) -> Iterator[None]:
    """Call `repair` if the block fails. The block's error is raised, even if `repair` fails too."""
    try:
        yield
    except BaseException:
        try:
            repair()
        except Exception:
            # If the device is lost, for example, every further call fails as well.
            logger.exception("cleaning up after the error below failed; build a new engine")
        raise
