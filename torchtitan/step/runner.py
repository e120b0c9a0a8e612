"""Microbatches, and the runner that calls the model on them.

`Runner.prepare` makes a `Microbatch` of a batch, and `Runner.run` calls the model on microbatches, locally
or through a pipeline schedule.

B sequences, T tokens, V vocabulary entries, cp context-parallel ranks.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import distributed
from torchtitan.batch.batch import Entries, TokenBatch
from torchtitan.batch.context import ContextSharding, join_outputs, shard_batch
from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    PARENT_IDS,
    positions_from_document_ids,
    warn_of_restarts,
)
from torchtitan.batch.dummy_microbatches import without_counting, zero_loss
from torchtitan.batch.mask import shards_of
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.distributed.processes.failure_watch import Watch
from torchtitan.tools.host_copy import on_host, to_device
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import keywords_of

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

Outputs = TypeVar("Outputs", covariant=True)


class Head(Protocol[Outputs]):
    """Computes outputs from hidden states in place of logits; see `loss.logprobs`.

    If the output projection has an adapter, the head is also called with `low_rank`, whose
    `add_to(logits)` adds the adapter's part.
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

    inputs, labels: [B, T].
    extra_inputs: the batch's other entries, including positions. extra_kwargs: the attention masks.
    Under context parallelism all hold this rank's tokens, and the positions are in extra_kwargs.
    """

    inputs: Tensor
    labels: Tensor | None
    extra_inputs: Entries
    extra_kwargs: Entries

    def keywords_for(self, model: nn.Module) -> dict[str, Any]:
        """Return extra_inputs and extra_kwargs; if `forward` has no **kwargs, only its parameters."""
        keywords = self.extra_inputs | self.extra_kwargs
        names, takes_any = keywords_of(model.forward)
        return {key: x for key, x in keywords.items() if takes_any or key in names}


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """One batch of a call, or under a pipeline some of its rows, on the model's device.

    Under context parallelism it holds this rank's tokens.

    inputs, kwargs: arguments of the model's forward. inputs and labels are [B, T].
    batch: the caller's entries, for loss and output functions.
    join: turns outputs for this rank's tokens into outputs for whole rows. Collective.
    is_dummy: True if it runs only because other ranks have more microbatches.
    reduces_gradients: False if a later microbatch reduces the gradients. Pipelines ignore this field.
    """

    inputs: Tensor
    kwargs: Entries
    labels: Tensor | None
    batch: Entries
    join: Callable[[Any], Any] = lambda outputs: outputs
    is_dummy: bool = False
    reduces_gradients: bool = True


OnOutput = Callable[[Any, Microbatch], Any]


# ---- the model's inputs ----


def model_inputs(
    policy: DocumentPolicy, batch: TokenBatch, model: Any, sharding: ContextSharding | None = None
) -> ModelInputs:
    """Return the arguments of the model's forward for a batch.

    Entries of `BOUNDARY_KEYS` are left out. A padding mask [B, T] becomes the kernel's mask. If the
    batch has no masks, and attn_type is not "sdpa", attention masks are added, and positions too if the
    batch has document ids but no positions, and `training.restart_positions` is set.
    """
    batch = policy.token_batch(batch)
    entries, document_ids = dict(batch.entries), batch.document_ids
    masks: Entries = {}
    if isinstance(entries.get("attention_masks"), Tensor):
        masks["attention_masks"] = model.get_padding_masks(entries.pop("attention_masks"))
    elif policy.attn_type != "sdpa" and "attention_masks" not in entries:
        masks["attention_masks"] = _masks_of_documents(policy, batch, model)
        if document_ids is not None and policy.restart_positions and "positions" not in entries:
            restarted = positions_from_document_ids(on_host(document_ids))
            entries["positions"] = to_device(restarted, batch.tokens.device)
    from_loader = batch.sample_ids is not None  # the dataloader's rows always have document ids
    for key in BOUNDARY_KEYS:
        is_given = entries.pop(key, None) is not None
        if is_given and not from_loader and not policy.separates_documents:
            warn_once(
                logger,
                f"the batch's {key!r} separate no documents under model.attn_mask_type = 'causal'; set it "
                "to 'block_causal' or 'position_block_causal', with model.attn_type 'flex' or 'varlen'",
            )
    entries.pop(PARENT_IDS, None)
    positions = entries.get("positions")
    if not policy.separates_documents and "attention_masks" not in batch.entries:
        if isinstance(positions, Tensor) and positions.dim() == 2:
            warn_of_restarts(positions)
    inputs = ModelInputs(batch.tokens, batch.labels, entries, masks)
    return inputs if sharding is None else ModelInputs(*sharding.shard(*inputs))


def _masks_of_documents(policy: DocumentPolicy, batch: TokenBatch, model: Any) -> Any:
    if getattr(model, "makes_document_masks", False):
        return model.document_masks(batch.tokens, batch.document_ids, batch.depths)
    if batch.depths is not None:
        raise ValueError(
            f"{type(model).__name__} makes its own attention masks, which can't have trees of documents, got "
            f"a batch with {PARENT_IDS!r}; give each branch its own copy of its ancestors' tokens"
        )
    # A client's model, as in torchtitan 0.2.x: it reads the documents from a dict of the batch's entries.
    entries = dict(batch.entries)
    if batch.document_ids is not None:
        # The document ids are known: drop their other sources, or the model would compare them again.
        for key in (*BOUNDARY_KEYS, "positions"):
            entries.pop(key, None)
        entries["document_ids"] = batch.document_ids
    return model.get_attention_masks(
        input_batch=batch.tokens, tokenizer=policy.tokenizer, extra_inputs=entries
    )


# ---- the model ----


@dataclasses.dataclass
class Runner:
    """Calls the model on microbatches, locally or through a pipeline schedule.

    model_parts: the model, or this rank's stages of a pipeline. train_context: makes the context
        manager around forwards and backwards. amp: the mixed-precision context of forwards.
    sharding, schedule: None without context parallelism, or without pipeline parallelism.
    has_value_head: outputs are values [B, T, 1], and the model takes no head.
    has_replicas: the model or its shards are replicated (DDP, HSDP).
    defers_reduction: gradients are reduced only in the last microbatch of a step. If False, only
        HSDP's all-reduce over replicas is deferred, to the last call of a step.
    keeps_weights: FSDP keeps gathered weights after a forward, and with `defers_reduction` also after
        a backward that another microbatch follows.
    gradient_factor: multiplies losses before backward: the number of ranks if gradients are averaged
        for a client's own backward, so that the engine's gradients are sums; 1 otherwise.
    watch: raises callers' failures on all ranks. dp_group: the ranks that read different batches.
    dummy: makes the batch of a dummy microbatch.
    client_inputs: returns the model's inputs for a batch on the device, or None to call `model_inputs`;
        for clients of torchtitan 0.2.x that override `post_dataloading_process`.
    """

    model_parts: list[nn.Module]
    device: torch.device
    train_context: Callable[[], contextlib.AbstractContextManager[None]]
    amp: contextlib.AbstractContextManager[None]
    sharding: ContextSharding | None = None
    schedule: "PipelineSchedule | None" = None
    has_value_head: bool = False
    defers_reduction: bool = False
    has_replicas: bool = False
    keeps_weights: bool = False
    gradient_factor: float = 1.0
    watch: Watch = dataclasses.field(default_factory=Watch)
    dp_group: dist.ProcessGroup | None = None
    dummy: Callable[[], TokenBatch] | None = None
    client_inputs: Callable[[TokenBatch], ModelInputs | None] = lambda batch: None
    # Makes an additional context for each microbatch's forward and for its backward.
    around: "Callable[[Microbatch], contextlib.AbstractContextManager[None]] | None" = None
    # True: more calls follow before the optimizer step.
    more_follow: bool = dataclasses.field(default=False, init=False)

    @property
    def has_outputs(self) -> bool:
        """False on pipeline ranks without the last stage."""
        return self.schedule is None or self.schedule.has_last_stage

    @property
    def num_context_ranks(self) -> int:
        """The number of ranks that share the tokens of each row."""
        return 1 if self.sharding is None else self.sharding.mesh.size()

    # ---- before the model ----

    def prepare(
        self,
        batch: TokenBatch,
        policy: DocumentPolicy,
        head: Head | None = None,
        whole_rows: bool = False,
    ) -> Microbatch:
        """Return the `Microbatch` that the model and the loss get for a batch.

        head: computes outputs in place of logits; it is called with the batch's labels.
        whole_rows: under context parallelism `labels` and `batch` keep whole rows.
        """
        sharding, model = self.sharding, self.model_parts[0]
        joins_rows = whole_rows and sharding is not None
        padded = (batch if sharding is None else sharding.pad(batch)).to(self.device)
        inputs = self.client_inputs(padded) or model_inputs(policy, padded, model, sharding)
        kwargs, labels, entries = inputs.keywords_for(model), inputs.labels, padded.as_dict()
        join = Microbatch.join
        if sharding is not None:
            shards, n_tokens = shards_of(kwargs["attention_masks"]), inputs.inputs.shape[1]
            unlabeled = dataclasses.replace(padded, labels=None, document_ids=None, depths=None)
            entries = shard_batch(unlabeled, shards).as_dict()
            sizes = {"n_tokens": n_tokens, "seq_len": batch.tokens.shape[1]}
            join = functools.partial(join_outputs, shards=shards, **sizes)
        if head is not None:
            # With whole rows the ranks join the heads' outputs, so no rank may return 0 in place of outputs.
            kwargs["head"] = self._labeled(head, labels, entries, attempts=not joins_rows)
        if joins_rows:
            whole = batch.to(self.device)
            labels, entries = whole.labels, whole.as_dict()
        return Microbatch(inputs.inputs, kwargs, labels, entries, join)

    def _labeled(
        self, head: Head, labels: Tensor | None, entries: Entries, attempts: bool
    ) -> Callable[..., Any]:
        """Return the head bound to a microbatch's labels and, if it has `with_batch`, to the entries.

        attempts: return a scalar 0 if the head, or a caller's function earlier in this call, fails.
        """
        if reads_batch := getattr(head, "with_batch", None):
            head = reads_batch(entries)
        head = functools.partial(head, labels=labels)

        def attempted(*tensors: Tensor | None, group: Any = None, **adapter: Any) -> Any:
            compute = functools.partial(head, *tensors, group=group, **adapter)
            # A head with a group is collective, so no rank may skip it.
            if group is not None:
                return compute()
            return self.watch.attempt(compute, lambda: zero_loss((tensors, adapter)))

        return attempted if attempts else head

    def microbatches(
        self,
        batches: Sequence[TokenBatch],
        policy: DocumentPolicy,
        head: Head | None,
        n_dummies: Callable[[], int],
        reduce_with_last: bool = False,
        whole_rows: bool = False,
    ) -> Iterator[Microbatch]:
        """Yield the microbatches, each prepared when it is needed, then dummies until all ranks are done.

        n_dummies: from `num_dummies`. reduce_with_last: if the job defers reductions, only the last
        microbatch, dummies included, reduces gradients.
        """
        defers = reduce_with_last and self.defers_reduction
        for i, batch in enumerate(batches):
            microbatch = self.prepare(batch, policy, head, whole_rows)
            is_last = i + 1 == len(batches)
            # n_dummies() waits for the device: call it last, and only if its result matters.
            if not is_last or (defers and n_dummies()):
                microbatch = dataclasses.replace(microbatch, reduces_gradients=False)
            yield microbatch
        if n := n_dummies():
            dummy = dataclasses.replace(self.prepare(self.dummy(), policy), is_dummy=True)
            for i in range(n):
                yield dataclasses.replace(dummy, reduces_gradients=i + 1 == n)

    # ---- the model ----

    def run(
        self, microbatches: Iterable[Microbatch], on_output: OnOutput, *, backward: bool = False
    ) -> list[Any] | None:
        """Run the model; return on_output(logits, microbatch) for each microbatch that is not a dummy.

        microbatches: read one at a time; a pipeline reads all of them first.
        backward: on_output returns a loss, whose gradients are accumulated; the results are detached.
        Returns None on pipeline ranks without the last stage. After a failure the model can be called again,
        except if a pipeline schedule failed and the reason was not a caller's function.
        """

        def result_of(logits: Any, microbatch: Microbatch) -> Any:
            if not microbatch.is_dummy:
                return on_output(logits, microbatch)
            return zero_loss(logits) if backward else None

        with on_error(self.recover):
            if self.schedule is not None:
                outputs = self._run_schedule(list(microbatches), result_of, backward)
            else:
                outputs = []
                for microbatch in microbatches:
                    output = self._run_locally(microbatch, result_of, backward)
                    if not microbatch.is_dummy:
                        outputs.append(output)
        if not backward:
            # FSDP leaves the last unit gathered; later gradients would go to that unit's gathered parameters.
            self.reshard()
        return outputs

    def _run_locally(self, microbatch: Microbatch, result_of: OnOutput, backward: bool) -> Any:
        (model,) = self.model_parts
        deferring = self._deferring(microbatch) if backward else contextlib.nullcontext()
        with self._around(microbatch), deferring, self.train_context():
            with self.amp:
                outputs = model(microbatch.inputs, **microbatch.kwargs)
                result = result_of(outputs, microbatch)
            if not backward:
                return result
            # Free the logits [B, T, V] before backward allocates memory.
            del outputs
            (result * self.gradient_factor).backward()
        return result.detach()

    def _run_schedule(
        self, microbatches: Sequence[Microbatch], result_of: OnOutput, backward: bool
    ) -> list[Any] | None:
        # On the last stage the schedule calls loss_fn(output, target) for each microbatch, and puts the
        # results into `outputs`. The target is the Microbatch itself.
        outputs: list[Any] = []
        if microbatches:
            # After a failure, the watch compares the ranks' numbers of collectives, which don't include sends
            # between stages. If this block fails, the flag stays False, and the engine cannot be used again.
            self.watch.counts_collectives = False
            with self.train_context(), self.amp:
                run = self.schedule.step if backward else self.schedule.eval
                run(
                    arg_mbs=[(x.inputs,) for x in microbatches],
                    kwarg_mbs=[x.kwargs for x in microbatches],
                    input_shapes=[tuple(x.inputs.shape[:2]) for x in microbatches],
                    target_mbs=microbatches,
                    losses=outputs,
                    loss_fn=result_of,
                    return_outputs=False,
                    context_mbs=[functools.partial(self._around, x) for x in microbatches],
                )
            self.watch.counts_collectives = True
        if not self.has_outputs:
            return None
        outputs = [x for x, mb in zip(outputs, microbatches, strict=True) if not mb.is_dummy]
        return [loss.detach() for loss in outputs] if backward else outputs

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a forward that the caller ran."""
        with on_error(self.recover), self.train_context():
            (loss * self.gradient_factor).backward()

    # ---- around a microbatch ----

    @contextlib.contextmanager
    def _around(self, microbatch: Microbatch) -> Iterator[None]:
        """Enter the microbatch's `around` context; experts do not count a dummy's tokens."""
        counting_parts = self.model_parts if microbatch.is_dummy else []
        around = self.around(microbatch) if self.around else contextlib.nullcontext()
        with without_counting(counting_parts), around:
            yield

    @contextlib.contextmanager
    def more_microbatches_follow(self) -> Iterator[None]:
        """A context for all calls of a step but the last: gradient reductions may be deferred."""
        before, self.more_follow = self.more_follow, True
        try:
            yield
        finally:
            self.more_follow = before

    @contextlib.contextmanager
    def _deferring(self, microbatch: Microbatch) -> Iterator[None]:
        """If the job defers reductions, leave gradients unreduced until a later microbatch."""
        later = self.more_follow or not microbatch.reduces_gradients
        # Without training.defer_gradient_sync, only HSDP's all-reduce over replicas is deferred.
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
        """Set training or evaluation mode now; leaving the returned stack restores every module's mode."""
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
        # Cached, because walking over all modules costs 1 % of a small step.
        modules = (module for part in self.model_parts for module in part.modules())
        return any(isinstance(module, distributed.FSDPModule) for module in modules)

    def recover(self) -> None:
        """Drop gathered weights and gradients that were not reduced yet, after a failure."""
        for part in self.model_parts:
            distributed.recover_model(part)

    def reshard(self) -> None:
        """Free the weights that FSDP has gathered, even if a client's own forward gathered them."""
        if self._has_fsdp:
            for part in self.model_parts:
                distributed.reshard_model(part)

    def bytes_to_keep_gathered(self) -> int:
        """Extra bytes that `keep_gathered` would hold on this rank."""
        return sum(map(distributed.bytes_to_keep_gathered, self.model_parts))

    def keep_gathered(self) -> contextlib.ExitStack:
        """A context in which FSDP gathers weights only in the first forward, and frees them at the end."""
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
        except Exception:  # for example because the device is lost
            logger.exception("cleaning up after the error below failed; build a new engine")
        raise
