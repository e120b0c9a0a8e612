"""The one place where a model is called: forward or backward, locally or through a pipeline.

B sequences, T tokens, V vocabulary entries, cp context-parallel ranks.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import distributed
from torchtitan.batch.batch import Entries, PackedBatch
from torchtitan.batch.context import ContextSharding, join_outputs, shard_batch, shards_of
from torchtitan.batch.fillers import num_fillers, without_counting, zero_loss
from torchtitan.batch.packing import ModelInputs
from torchtitan.distributed.processes.failure_watch import Alone
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import keywords_of

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

Outputs = TypeVar("Outputs", covariant=True)


class Head(Protocol[Outputs]):
    """What a decoder computes from hidden states in place of logits; see `loss.logprobs`."""

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> Outputs: ...


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """What the model and the loss get of one microbatch, on the model's device.

    inputs, kwargs: of the model's forward. labels: [B, T], or None. batch: the caller's entries.
    Under context parallelism they hold this rank's tokens, [B, T/cp].
    join: turns outputs for this rank's tokens into those for whole rows; collective.
    is_filler: run only to keep step with ranks that have more microbatches.
    reduces_gradients: the last one of a call; gradients of earlier ones may wait for it.
    """

    inputs: Tensor
    kwargs: Entries
    labels: Tensor | None
    batch: Entries
    join: Callable[[Any], Any] = lambda outputs: outputs
    is_filler: bool = False
    reduces_gradients: bool = True


OnOutput = Callable[[Any, Microbatch], Any]


@dataclasses.dataclass
class Runner:
    """Calls the model on microbatches, in the contexts that the job wants.

    process: a batch on the device -> what the model's forward gets.
    train_context, amp: entered around every forward; the former around backward, too.
    schedule, has_last_stage: under pipeline parallelism.
    watch: has functions of the caller fail on all ranks.
    dp_group, filler: the ranks that read different batches, and what they run to keep step.
    defers_reduction: gradients are reduced with the last microbatch of a step; without it, only
        the sum over the replicas of HSDP waits.
    """

    model_parts: list[nn.Module]
    device: torch.device
    process: Callable[[PackedBatch], ModelInputs]
    train_context: Callable[[], contextlib.AbstractContextManager[None]]
    amp: contextlib.AbstractContextManager[None]
    sharding: ContextSharding | None = None
    schedule: "PipelineSchedule | None" = None
    has_last_stage: bool = True
    defers_reduction: bool = False
    has_replicas: bool = False
    keeps_weights: bool = False
    # Makes sums, in steps of its own, of the means that a client's own backward has.
    gradient_factor: float = 1.0
    watch: Alone = dataclasses.field(default_factory=Alone)
    dp_group: dist.ProcessGroup | None = None
    filler: Callable[[], PackedBatch] | None = None
    more_follow: bool = dataclasses.field(default=False, init=False)

    # ---- before the model ----

    def prepare(
        self, batch: PackedBatch, head: Head | None = None, whole_rows: bool = False
    ) -> Microbatch:
        """head: gets the batch's labels in place of the loss.

        whole_rows: labels and batch are left whole under context parallelism.
        """
        whole = batch
        if self.sharding is not None:
            batch = self.sharding.pad(batch)
        batch = batch.to(self.device)
        inputs, labels, extra_inputs, extra_kwargs = self.process(batch)
        kwargs = extra_inputs | extra_kwargs
        names, takes_any = keywords_of(self.model_parts[0].forward)
        if not takes_any:
            kwargs = {key: value for key, value in kwargs.items() if key in names}
        more = {}
        if self.sharding is None:
            own = batch.as_dict()
        else:
            shards, n_tokens = shards_of(kwargs["attention_masks"]), inputs.shape[1]
            entries = dataclasses.replace(batch, labels=None, document_ids=None)
            own = shard_batch(entries, shards).as_dict()
            more["join"] = functools.partial(
                join_outputs, shards=shards, n_tokens=n_tokens, seq_len=whole.tokens.shape[1]
            )
        if head is not None:
            if reads_batch := getattr(head, "with_batch", None):
                head = reads_batch(own)
            kwargs["head"] = functools.partial(head, labels=labels)
            # Outputs that ranks join with each other must not be missing on one of them.
            if not (whole_rows and self.sharding is not None):
                kwargs["head"] = functools.partial(self._attempt_head, kwargs["head"])
        if whole_rows and self.sharding is not None:
            whole = whole.to(self.device)
            labels, own = whole.labels, whole.as_dict()
        return Microbatch(inputs, kwargs, labels, own, **more)

    def _attempt_head(
        self,
        head: Head,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Any:
        """What the head returns, or a scalar 0 if a function has failed; see `FailureWatch`."""

        def compute() -> Any:
            return head(h, weight, bias, group=group)

        if group is not None:  # the ranks of tensor parallelism compute it together
            return compute()
        return self.watch.attempt(compute, lambda: zero_loss((h, weight, bias)))

    def ask_num_fillers(self, n: int, is_single: bool) -> Callable[[], int]:
        """How many microbatches this rank, with `n`, has fewer than others; see `num_fillers`.

        is_single: every rank has one batch. Otherwise, this is collective.
        """
        return num_fillers(n, None if is_single else self.dp_group, self.device)

    def microbatches(
        self,
        batches: Sequence[PackedBatch],
        head: Head | None,
        n_fillers: Callable[[], int],
        reduce_with_last: bool = False,
        whole_rows: bool = False,
    ) -> Iterator[Microbatch]:
        """Prepare one microbatch after the other, then fillers until all ranks are done.

        reduce_with_last: mark the last one of them all. whole_rows: see `prepare`.
        """
        defers = reduce_with_last and self.defers_reduction
        for i, batch in enumerate(batches):
            microbatch = self.prepare(batch, head, whole_rows)
            is_last = i + 1 == len(batches)
            # Asked for after the others are queued, and only where the answer matters.
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
        """Call on_output(logits, microbatch) for each microbatch, fillers excepted.

        microbatches: taken one at a time, except by a pipeline.
        backward: on_output returns a loss, whose gradients are accumulated.
        Returns what on_output returned, losses detached; None on pipeline ranks without the last
        stage. If this fails, the model can be called again.
        """
        with on_error(self.recover):
            if self.schedule is None:
                run = self._forward_backward if backward else self._forward
                outputs = [
                    output
                    for microbatch in microbatches
                    for output in [run(microbatch, on_output)]
                    if not microbatch.is_filler
                ]
            else:
                outputs = self._run_schedule(list(microbatches), on_output, backward)
        if not backward:
            # FSDP keeps the last unit gathered, whose gradients nobody would see then.
            self.reshard()
        return outputs

    def _forward(self, microbatch: Microbatch, on_output: OnOutput) -> Any:
        (model,) = self.model_parts
        with self.train_context(), self.amp:
            logits = model(microbatch.inputs, **microbatch.kwargs)
            return None if microbatch.is_filler else on_output(logits, microbatch)

    def _forward_backward(self, microbatch: Microbatch, on_output: OnOutput) -> Tensor:
        (model,) = self.model_parts
        with self._counting(microbatch), self._reducing(microbatch), self.train_context():
            with self.amp:
                logits = model(microbatch.inputs, **microbatch.kwargs)
                loss = zero_loss(logits) if microbatch.is_filler else on_output(logits, microbatch)
            del logits  # [B, T, V]: free before backward needs the memory
            self._backward(loss)
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Of a forward that the caller has made. If this fails, the model can be called again."""
        with on_error(self.recover), self.train_context():
            self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        (loss * self.gradient_factor).backward()

    def _run_schedule(
        self, microbatches: Sequence[Microbatch], on_output: OnOutput, backward: bool
    ) -> list[Any] | None:
        def call(logits: Any, microbatch: Microbatch) -> Any:
            if not microbatch.is_filler:
                return on_output(logits, microbatch)
            return zero_loss(logits) if backward else None

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
            self.watch.counts_collectives = False
            with self.train_context(), self.amp:
                if backward:
                    counting = [functools.partial(self._counting, mb) for mb in microbatches]
                    self.schedule.step(**inputs, context_mbs=counting)
                else:
                    self.schedule.eval(**inputs)
            self.watch.counts_collectives = True
        if not self.has_last_stage:
            return None
        outputs = [x for x, mb in zip(outputs, microbatches, strict=True) if not mb.is_filler]
        return [loss.detach() for loss in outputs] if backward else outputs

    @property
    def backward_orders_ranks(self) -> bool:
        """Whether this rank's step ends after every other rank's last function, by itself.

        On an accelerator the host does not wait for the collectives of backward.
        """
        if self.device.type != "cpu":
            return False
        if self.schedule is None and self.more_follow:
            return not (self.defers_reduction or self.has_replicas)
        if self.schedule is None and self.dp_group is None and self.sharding is None:
            # Tensor parallelism alone: there is nothing to reduce, and backward communicates
            # as far down as there are gradients to compute.
            blocks = getattr(self.model_parts[0], "layers", None)
            first = next(iter(blocks.values()), None) if blocks else None
            return first is not None and any(p.requires_grad for p in first.parameters())
        return True

    def _counting(self, microbatch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """Experts count the tokens of all microbatches but fillers."""
        if microbatch.is_filler:
            return without_counting(self.model_parts)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def more_microbatches_follow(self) -> Iterator[None]:
        """Backwards inside are not the last ones before the optimizer step."""
        before, self.more_follow = self.more_follow, True
        try:
            yield
        finally:
            self.more_follow = before

    @contextlib.contextmanager
    def _reducing(self, microbatch: Microbatch) -> Iterator[None]:
        """Leave the gradients inside to be reduced with a later microbatch's, where that is due."""
        later = self.more_follow or not microbatch.reduces_gradients
        # Without the key, what waits is the sum over HSDP's copies, in the trainer's own loop.
        is_cheap = self.more_follow and self.has_replicas
        if not (later and (self.defers_reduction or is_cheap)):
            yield
            return
        how = {"whole": self.defers_reduction, "keeps_weights": self.keeps_weights}
        self._of_fsdp("reduce_later", True, **how)
        try:
            yield
        finally:
            self._of_fsdp("reduce_later", False, **how)

    # ---- around the model ----

    def mode(self, training: bool) -> contextlib.ExitStack:
        """Set training or evaluation mode at once; leaving the stack restores every module's."""
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

    def _of_fsdp(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What our FSDP function of this name returns for each part.

        [] if nothing can have been sharded: its module takes a second to import.
        """
        if "torch.distributed.fsdp" not in sys.modules:
            return []
        return [getattr(distributed, name)(part, *args, **kwargs) for part in self.model_parts]

    @functools.cached_property
    def _has_fsdp(self) -> bool:
        """Whether FSDP holds parameters of the model: looking at all modules costs a small step 1 %."""
        if "torch.distributed.fsdp" not in sys.modules:
            return False
        modules = (module for part in self.model_parts for module in part.modules())
        return any(isinstance(module, distributed.FSDPModule) for module in modules)

    def recover(self) -> None:
        """Make the model ready for its next forward after one that failed; drops what it gathered,
        and gradients that were not reduced yet."""
        self._of_fsdp("recover_model")

    def reshard(self) -> None:
        """Free what FSDP has gathered, in a client's own forward, too."""
        if self._has_fsdp:
            self._of_fsdp("reshard_model")

    def bytes_to_keep_gathered(self) -> int:
        """What this rank would hold besides, if forwards did not free what FSDP gathers."""
        return sum(self._of_fsdp("bytes_to_keep_gathered"))

    def keep_gathered(self) -> contextlib.ExitStack:
        """Inside, FSDP gathers weights in the first forward only; frees them at the end."""
        stack = contextlib.ExitStack()
        for gathered in self._of_fsdp("keep_gathered"):
            stack.enter_context(gathered)
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
            # Where the device is lost, for example, every further call fails as well.
            logger.exception("cleaning up after the error below failed; build a new engine")
        raise
