"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program that brings its own batches, loss and loop builds a `TrainingEngine` inside its own
process; `torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

In its host process an engine is a guest: it draws no random numbers from the host's generators, and
seeds them only if `debug.seed` is set. Settings that it changes, and a default process group that
it makes, are given back by the last `close()` of the process's engines. The groups of its mesh live
as long as the default group: torch's caches may have passed them on to others.

Letters used below: B sequences, T tokens, V vocabulary entries. What steps are given:

    microbatches    one batch on every rank, or a list of them. Rows and T may differ between them,
                    and data-parallel ranks may have lists of different lengths, empty ones too;
                    all ranks of a pipeline give the same.
    labels          [B, T], or a list of one per microbatch; where none are given, a batch's own entry
                    "labels", and None without that.
    head            computed in place of logits, such as `TokenLogProbs()`, which then never exist
                    whole; functions get its outputs.
    functions       of the caller, for outputs or a loss: they get logits [B, T, V], or values
                    [B, T, 1] from a model with `model.value_head`, and the batch. Logits are whole
                    under tensor parallelism. Under context parallelism they are those of this
                    rank's tokens, [B, T/cp, ...], and so are the batch's tensors [B, T, ...].
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, overload

import torch

from torchtitan import build, rank_layout
from torchtitan.batch.batch import (
    Batch,
    Entries,
    Microbatches,
    PackedBatch,
    batch_to,
    dict_if_overridden,
)
from torchtitan.batch.packing import ModelInputs, PackingPolicy
from torchtitan.checkpoint.states import USER_STATE, UserState
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.job import resolve_job
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.rank_layout import RankLayout
from torchtitan.step.forward_backward import (
    Labels,
    backward,
    check_open,
    check_trains,
    forward,
    forward_backward,
    prepare,
)
from torchtitan.step.outputs import Reductions, StepOutput
from torchtitan.step.runner import Head, Microbatch, on_error
from torchtitan.step.update import OptimStepResult
from torchtitan.tools import host
from torchtitan.tools.logging import logger

ENGINE_API_VERSION = 1

Outputs = TypeVar("Outputs")
Result = TypeVar("Result")


class TrainingEngine(build.EngineParts):
    """Everything between a config and an optimizer step, wired once.

    Never builds a tokenizer, dataloader or validator. An existing default process group is
    reused. The config is checked here, before a device or a process group is touched, and
    never written to. As a context manager it closes itself.

    train_spec: in place of the registered one of `model.name`; nothing is registered.
    layout: from `RankLayout.join`, whose groups this engine then shares; None makes new ones.
    forward_only: an engine for scoring. It has no optimizer state, takes no training step, and
        reads and writes no more of checkpoints than the weights and the counters.

    Raises ConfigError for a config that cannot run, ValueError for a layout of other degrees.
    """

    # Trainer replaces these; an engine has no data.
    builds_data = False
    tokenizer: Any = None
    dataloader: Any = None
    metrics_processor: Any = None

    step: int = 0
    ntokens_seen: int = 0
    _loaded_step = _loaded_version = 0

    def __init__(
        self,
        job_config: JobConfig,
        *,
        train_spec: TrainSpec | None = None,
        layout: RankLayout | None = None,
        forward_only: bool = False,
    ):
        torch._C._log_api_usage_once("torchtitan.train")
        self.job_config = job_config
        logger.info("job: %s", job_config.job.description)

        self.train_spec = resolve_job(job_config, self.builds_data, train_spec)
        self.forward_only = forward_only
        host.move_in(self)
        with on_error(self.close):
            build.build_engine(self, layout)

    @classmethod
    def from_hf(
        cls, folder: str | os.PathLike[str], job_config: JobConfig | None = None, **options: Any
    ) -> Self:
        """Return an engine with the model and the weights of a Hugging Face folder. Collective.

        folder: with config.json and safetensors files.
        job_config: everything else; its `model.name`, `.flavor` and `.hf_assets_path` are not
            asked. options: those of the constructor; a train_spec, of the folder's family, gives
            everything but the model's arguments.
        Raises ValueError for a folder that describes no model of ours, or whose files do not fit
        its config.json.
        """
        spec = options.pop("train_spec", None)
        job_config, spec = build.job_of_hf(folder, job_config, spec, cls.builds_data)
        engine = cls(job_config, train_spec=spec, **options)
        with on_error(engine.close):
            engine.load(os.fspath(folder), model_only=True)
        return engine

    def init_distributed(self) -> ParallelDims:
        """Join or reuse the process group and return the layout of ranks."""
        if hasattr(self, "layout"):  # a given one
            return self.layout.dims_for(self.job_config, self.train_spec)
        return rank_layout.join_ranks(self.job_config, self.train_spec, self.device)

    def build_data(self) -> None:
        """Hook for subclasses that own data; called before the model is built."""

    @property
    def packing(self) -> PackingPolicy:
        """How documents in a batch are told apart; follows a tokenizer that is set later."""
        return PackingPolicy.of(self.job_config.training, self.model_args, self.tokenizer)

    # ---- training or evaluating ----

    def train_mode(self) -> contextlib.ExitStack:
        """Put the model into training mode, at once; as a context manager, until its end."""
        return self.runner.mode(training=True)

    def eval_mode(self) -> contextlib.ExitStack:
        """Put the model into evaluation mode, at once; as a context manager, until its end."""
        return self.runner.mode(training=False)

    # ---- one step ----

    def to_device(self, batch: Mapping[str, Any]) -> Entries:
        """Copy of `batch` with its tensors on the engine's device; other values as they are."""
        return batch_to(batch, self.device)

    def post_dataloading_process(
        self, input_dict: Batch | PackedBatch, labels: torch.Tensor | None
    ) -> ModelInputs:
        """Return (inputs [B, T], labels, extra_inputs, extra_kwargs) for the model's forward.

        Every pipeline stage gets both of the last two: positions and masks come in either. Under
        context parallelism all hold this rank's tokens, [B, T/cp].
        """
        packing = self.packing
        return packing.model_inputs(
            self.model_parts[0],
            packing.pack(input_dict, labels),
            self.tokenizer,
            self.context_sharding,
        )

    def model_inputs(self, batch: PackedBatch) -> ModelInputs:
        """Return what `post_dataloading_process` does; a client's own one gets a dict."""
        method = self.post_dataloading_process
        return method(dict_if_overridden(method, TrainingEngine, batch), batch.labels)

    @overload
    def forward_step(
        self, microbatches: Microbatches, *, labels: Labels = None
    ) -> list[torch.Tensor] | None: ...

    @overload
    def forward_step(
        self, microbatches: Microbatches, *, labels: Labels = None, head: Head[Outputs]
    ) -> list[Outputs] | None: ...

    @overload
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[torch.Tensor, Any], Result],
        head: None = None,
    ) -> list[Result] | None: ...

    @overload
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[Outputs, Any], Result],
        head: Head[Outputs],
    ) -> list[Result] | None: ...

    @torch.no_grad()
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        labels: Labels = None,
        output_fn: Callable[[Any, Any], Any] | None = None,
        head: Head[Any] | None = None,
    ) -> list[Any] | None:
        """Return the model's output for each microbatch, in order, without gradients.

        microbatches, labels, head: see the top of this module; labels are the head's.
        output_fn: (logits, batch) -> what is returned instead, so that logits need not be kept.
            Under context parallelism its tensors [B, T/cp, ...] are joined to [B, T, ...].

        Under pipeline parallelism None on the ranks without the last stage. Microbatches are
        not split then, so give several: one alone is at work on one stage at a time.
        Raises ValueError for a head and a batch without labels, or a model with a value head. If
        output_fn fails on some ranks, the others raise RunError and the engine stays usable; see
        `torchtitan.distributed.processes.failure_watch`.
        """
        check_open(self, "forward_step")
        self.offloader.check_here("forward_step", "model")
        with self.watch.call():
            return forward(self, microbatches, labels, output_fn, head)

    def from_last_stage(self, outputs: Result | None) -> Result:
        """What `forward_step` returned on the rank of the pipeline's last stage, on all ranks.

        outputs: or anything else made of tensors and objects that can be pickled; ignored on the
            other ranks. Tensors come on the engine's device. Collective over the pipeline; without
            one, `outputs` as they are.
        """
        schedule: Any = self.pp_schedule
        whole: Any = outputs
        return whole if schedule is None else schedule.tree_from_last_stage(whole)

    @overload
    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Outputs, torch.Tensor, Any], Any] | None = None,
        head: Head[Outputs] | None = None,
        whole_rows: bool = False,
        metrics: None = None,
    ) -> torch.Tensor: ...

    @overload
    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Outputs, torch.Tensor, Any], Any] | None = None,
        head: Head[Outputs] | None = None,
        whole_rows: bool = False,
        metrics: Reductions,
    ) -> StepOutput: ...

    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: Labels = None,
        global_valid_tokens: torch.Tensor | float | None = None,
        loss_fn: Callable[[Any, torch.Tensor, Any], Any] | None = None,
        head: Head[Any] | None = None,
        whole_rows: bool = False,
        metrics: Reductions | None = None,
    ) -> torch.Tensor | StepOutput:
        """Accumulate gradients of one or several microbatches until `optim_step`.

        input_dict, labels: microbatches and their labels, see the top of this module.
            Under pipeline parallelism one batch is split into microbatches of
            `pipeline_parallel_microbatch_size` rows, a list is taken as it is.
        global_valid_tokens: the loss denominator, counted over the whole global batch (all
            ranks, all microbatches). None leaves a loss_fn's sums as they are, for weights that
            hold the denominator already, or for `optim_step(denominator=...)`.
        loss_fn: (logits, labels, batch) -> sum over tokens; with `metrics` also (sum, metrics) or
            (sum, metrics, output), see `StepOutput`. Default is the train spec's loss, which
            under tensor parallelism gets a DTensor split along V, unless `disable_loss_parallel`
            is set.
        head: without a loss_fn the loss is minus the sum of its log-probs.
        whole_rows: under context parallelism loss_fn sees whole rows of what the model or head
            gave, of labels and batch, too. Tensors [B, T/cp, ...] are gathered for that, logits
            included. Each of the ranks that share the rows computes the whole loss and takes the
            gradient of its own tokens, and an equal part of the loss.
        metrics: names of the numbers that loss_fn returns, and whether each is summed or maximised
            over microbatches and ranks; they are not divided by the denominator. {} for none.
        Returns this rank's sum divided by the denominator, fp32; summed over `loss_group` it is the
        loss of the global batch. All ranks of a pipeline return the same. With `metrics`, a
        `StepOutput`, which has the loss of the global batch.

        Raises ValueError for the default loss without `global_valid_tokens`, for metrics that were
        not named, for a second microbatch before `optim_step` under
        `optimizer.early_step_in_backward`, which cannot accumulate, and for a model with a value
        head without a loss_fn, where the train spec's loss needs logits, or with a head.

        If loss_fn fails on some ranks, the others raise RunError at the end of the call. The engine
        stays usable then, and after any error that all ranks raise; gradients are those of a part
        of the microbatches: call `optimizers.zero_grad()`. After other errors of some ranks all
        ranks raise, and the engine is lost; see `torchtitan.distributed.processes.failure_watch`.
        """
        check_trains(self, "forward_backward_step")
        self.offloader.check_here("forward_backward_step", "model", "grad")
        with self.watch.call():
            return forward_backward(
                self, input_dict, labels, global_valid_tokens, loss_fn, head, whole_rows, metrics
            )

    def prepare(
        self, batch: Batch, labels: torch.Tensor | None = None, *, head: Head[Any] | None = None
    ) -> Microbatch:
        """What a forward of the caller's own takes, in every layout without a pipeline.

        with engine.train_context(), engine.maybe_enable_amp:
            outputs = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
            loss = ...  # from outputs, microbatch.labels, microbatch.batch
        engine.backward(loss)

        batch, labels, head: as in `forward_backward_step`. Under context parallelism inputs, labels
        and batch hold this rank's tokens, and `microbatch.join` makes whole rows of outputs.
        Raises ValueError under a pipeline, and as `forward_backward_step` does for bad batches.
        """
        return prepare(self, batch, labels, head)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that the caller computed, until `optim_step`.

        loss: this rank's share, divided by the denominator of the whole step already; summed over
            `loss_group` it is the loss of the global batch. Forwards and backwards alternate, as
            often on every rank.
        Raises ValueError under a pipeline, and for a loss that is no scalar with a gradient.
        """
        self.offloader.check_here("backward", "model", "grad")
        check_trains(self, "backward")
        with self.watch.call():
            backward(self, loss)

    def optim_step(
        self,
        *,
        lr: float | None = None,
        max_norm: float | None = None,
        denominator: torch.Tensor | float | None = None,
        advance_schedule: bool = True,
    ) -> OptimStepResult:
        """Clip, update the weights, advance the schedule and zero the gradients.

        lr: the learning rate of this step alone, in place of the schedule's; of every parameter
            group.
        max_norm: clip this step's gradients to it instead of to `training.max_norm`.
        denominator: this rank's share of what the gradients are divided by first, for callers
            that learn it only while they go through the microbatches: its sum over the
            data-parallel ranks counts, or its mean, as `training.gradient_reduction` says.
            Where that is 0, nothing is divided.
        advance_schedule: False leaves the learning rate to `lr_schedulers.step()`, for callers
            with several updates per step of the schedule.

        A norm that is not finite is handled by `training.nonfinite_grad_norm`: "skip" leaves
        weights and optimizer state as they are and goes on (at most 10 times in a row),
        "stop" raises FloatingPointError, "ignore" updates all the same. On an accelerator the host
        learns of it a step late; see `OptimStepResult`.
        Raises ValueError if no rank has a gradient and there was no `forward_backward_step`, for any
        of the arguments under `optimizer.early_step_in_backward`, for a `denominator` whose sum is
        negative or not finite, an `lr` that is, and a `max_norm` that is not above 0.
        """
        check_trains(self, "optim_step")
        self.offloader.check_here("optim_step", "model", "optimizer", "grad")
        self.update.refuse_late_arguments(lr=lr, max_norm=max_norm, denominator=denominator)
        self.update.check_arguments(lr, max_norm)
        with self.watch.call():
            # Parameters that a client's forward left gathered have no gradients.
            self.runner.reshard()
            return self.update.step(
                lr,
                max_norm,
                denominator,
                number=lambda: self.step if self._caller_counts_steps else self._steps_done + 1,
                before_update=self.checkpointer.maybe_wait_for_staging,
                advance_schedule=advance_schedule,
            )

    # ---- state ----

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds as `train_state`; the weights are in `model_parts`."""
        return {
            "step": self._steps_done,
            "ntokens_seen": self.ntokens_seen,
            "weights_version": self.weights_version,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Older checkpoints count steps only.
        state_dict = {"weights_version": state_dict["step"], **state_dict}
        for name in ("step", "ntokens_seen", "weights_version"):
            count = state_dict[name]
            if not isinstance(count, int) or not 0 <= count < 2**63:
                raise ValueError(
                    f"train_state.{name} of a checkpoint must be a whole number of at least 0, got "
                    f"{count!r}: the checkpoint is damaged; load another one"
                )
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]
        self.weights_version = state_dict["weights_version"]
        self._loaded_step, self._loaded_version = self.step, self.weights_version
        self._counters_restored = True

    def add_state(self, name: str, state: Any) -> None:
        """Have full checkpoints hold an object of the caller's, and loads restore it.

        state: has `state_dict()`, of numbers, strings, tensors and containers of these, and
            `load_state_dict()`. All ranks add the same names before they save or load; what is saved
            is one rank's, so give states that differ names of their own. Checkpoints without it load
            with "user_state" in `checkpoint.exclude_from_loading`.
        Raises ValueError for a name that is taken, and for a state of other data.
        """
        self.checkpointer.states.setdefault(USER_STATE, UserState()).add(name, state)

    @property
    def _caller_counts_steps(self) -> bool:
        return self.step != self._loaded_step

    @property
    def _steps_done(self) -> int:
        """`step`; where nobody counts there, optimizer steps on top of what was loaded."""
        if self._caller_counts_steps:
            return self.step
        return self.step + self.weights_version - self._loaded_version

    @property
    def weights_version(self) -> int:
        """Counts changes of the weights: optimizer steps, and loads that bring only weights.

        Waits for what the device says of the last step, and raises as the next `optim_step` would.
        """
        return self.update.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self.update.weights_version = version

    def save(self, path: str | None = None, *, force: bool = True) -> None:
        """Save model, optimizer, schedule and counters. Collective.

        path: the folder to write, itself; retention leaves it alone. None is a step folder of
            `checkpoint.folder`, named after `step`, or after the optimizer steps where nobody
            counts there.
        force: False leaves out what is not due: without `checkpoint.enable` everything, and with
            a dataloader what `checkpoint.interval` says. Without one, every save is due.
        """
        self.update.settle()
        self.checkpointer.save(self._steps_done, path=path, force=force)

    def save_hf(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write the model to a folder that `transformers` opens. Collective.

        The folder gets safetensors files with an index, config.json and the tokenizer; a tokenizer
        or a config.json of this model that is there already is kept.
        dtype: what floating-point tensors are cast to; None keeps each one's own.
        Raises ValueError for a model without a state_dict_adapter, RunError if it fails.
        """
        self.update.settle()
        self.checkpointer.save_hf(os.fspath(path), dtype)

    def load(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load a checkpoint, and return whether there was one. Collective.

        path: the folder of one checkpoint, DCP or Hugging Face files, and the only place that is
            looked at. None is what a run starts with: `checkpoint.load_step` of its own folder,
            else the initial checkpoint of the config.
        model_only: leave optimizer, schedule and counters as they are.

        Where `weights_version` is not restored, it goes up by one. Gradients are zeroed: they are those
        of other weights.
        """
        step = -1 if path is not None else self.job_config.checkpoint.load_step
        with contextlib.suppress(FloatingPointError, ValueError):
            self.update.settle()  # what was wrong with the last step goes with its weights
        self._counters_restored = False
        found = self.checkpointer.load(step, path=path, model_only=model_only)
        if found and not self._counters_restored:
            self.weights_version += 1
            self._loaded_version += 1  # no optimizer step
        if found:
            self.optimizers.zero_grad()
            self.update.forget_microbatches()
        return found

    def to(
        self,
        device: torch.device | str,
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """Put states away in host memory ("cpu"), or bring them back to the engine's device.

        model: parameters and buffers. optimizer: its state. grad: gradients.

        Parameters stay the same objects. State that is put away can be saved, loaded and exported;
        steps need it back. What is there already stays: on the CPU nothing ever moves.
        Raises ValueError for another device, and where hooks on parameters would be lost.
        """
        target = self.offloader.check_target(device)
        if self.offloader.can_move(self.job_config):
            self.checkpointer.maybe_wait_for_staging()
            self.checkpointer.release_model()
            self.offloader.move(target, model=model, optimizer=optimizer, grad=grad)

    def iter_hf_weights(
        self, *, dtype: torch.dtype | None = None, sharded: bool = False
    ) -> WeightStream:
        """(HF name, tensor) of all weights, one by one, with a version and a digest.

        dtype: what parameters are cast to; buffers and routers keep theirs.
        sharded: what this rank holds, without communication. Whole tensors are collective.
        See `WeightStream`. Raises ValueError for a model without a state_dict_adapter.
        """
        adapter = self.checkpointer.require_adapter()
        return WeightStream.of_engine(self, adapter, dtype=dtype, sharded=sharded)

    def close(self) -> None:
        """Finish pending checkpoint writes and give back what was on loan. Safe to call twice."""
        self.watch.close()
        try:
            if hasattr(self, "checkpointer"):  # the construction may have failed before it
                self.checkpointer.close()
        finally:
            host.move_out(self)
