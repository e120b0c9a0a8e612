"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program that brings its own batches, loss and loop builds a `TrainingEngine` inside its own
process; `torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

Letters used below: B sequences, T tokens, V vocabulary entries.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from torchtitan import build
from torchtitan.batch.batch import (
    Batch,
    Microbatches,
    PackedBatch,
    batch_to,
    dict_if_overridden,
)
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.packing import ModelInputs, PackingPolicy
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.job import resolve_job
from torchtitan.loss.cross_entropy import LossFunction
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.offload import Offloader
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.step.forward_backward import forward, forward_backward
from torchtitan.step.runner import Head, Runner, on_error
from torchtitan.step.update import OptimStepResult, Update
from torchtitan.tools import host
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

ENGINE_API_VERSION = 1


class TrainingEngine:
    """Everything between a config and an optimizer step, wired once.

    Never builds a tokenizer, dataloader or validator. An existing default process group is
    reused. The config is checked here, before a device or a process group is touched, and
    never written to. As a context manager it closes itself.

    In its host process it is a guest: it draws no random numbers from the host's generators, and
    seeds them only if `debug.seed` is set. Settings that it changes, and a default process group
    that it makes, are given back by the last `close()` of the process's engines. The groups of
    its mesh live as long as the default group: torch's caches may have passed them on to others.

    Raises ConfigError for a config that cannot run.
    """

    # Trainer replaces these; an engine has no data.
    builds_data = False
    tokenizer: Any = None
    dataloader: Any = None
    metrics_processor: Any = None

    # Set by `build_engine`, in this order.
    device: torch.device
    parallel_dims: ParallelDims
    context_sharding: ContextSharding | None
    seed: int
    model_args: Any
    model_converters: Any
    num_params: int
    num_flops_per_token: float  # of rows of `training.seq_len` tokens
    flops_without_attention: float  # of them
    global_batch_size: int
    gradient_accumulation_steps: int
    loss_fn: LossFunction
    model_parts: list[torch.nn.Module]
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    offloader: Offloader
    update: Update
    checkpointer: CheckpointManager
    train_context: Callable[[], contextlib.AbstractContextManager[None]]
    maybe_enable_amp: contextlib.AbstractContextManager[None]
    runner: Runner

    step: int = 0
    ntokens_seen: int = 0
    _loaded_step = _loaded_version = 0

    # Set under pipeline parallelism.
    pp_schedule: "PipelineSchedule | None" = None
    pp_has_first_stage: bool | None = None
    pp_has_last_stage: bool | None = None

    def __init__(self, job_config: JobConfig):
        torch._C._log_api_usage_once("torchtitan.train")
        self.job_config = job_config
        logger.info("job: %s", job_config.job.description)

        self.train_spec = resolve_job(job_config, self.builds_data)
        host.move_in(self)
        with on_error(self.close):
            build.build_engine(self)

    def init_distributed(self) -> ParallelDims:
        """Join or reuse the process group and return the layout of ranks."""
        return build.join_ranks(self.job_config, self.train_spec, self.device)

    def build_data(self) -> None:
        """Hook for subclasses that own data; called before the model is built."""

    # ---- where this rank stands ----

    @property
    def _batch_mesh(self):
        return self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None

    @property
    def dp_size(self) -> int:
        """How many groups of ranks read different batches."""
        return self._batch_mesh.size() if self._batch_mesh else 1

    @property
    def dp_rank(self) -> int:
        return self._batch_mesh.get_local_rank() if self._batch_mesh else 0

    @property
    def dp_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that read different batches of one step; None if there is only one."""
        return self._batch_mesh.get_group() if self._batch_mesh else None

    @property
    def lr(self) -> float:
        """The learning rate that the schedule has for the next step."""
        return float(self.lr_schedulers.schedulers[0].get_last_lr()[0])

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

    def to_device(self, batch: Batch) -> Batch:
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

    @torch.no_grad()
    def forward_step(
        self,
        microbatches: Microbatches,
        *,
        output_fn: Callable[[Any, Batch], Any] | None = None,
        head: Head | None = None,
    ) -> list[Any] | None:
        """Return the model's output for each microbatch, in order, without gradients.

        microbatches: one batch on every rank, or a list of them; rows and T may differ between
            them, and data-parallel ranks may have lists of different lengths, empty ones too.
        output_fn: applied to (logits [B, T, V], batch) on the spot, so that logits need not
            be kept; its results are returned instead.
        head: computed in place of logits, such as `TokenLogProbs()`, of `batch["labels"]` [B, T];
            its outputs are returned, or go to output_fn. Then logits never exist whole.

        Under pipeline parallelism None on the ranks without the last stage. Microbatches are
        not split then, so give several: one alone is at work on one stage at a time.
        Under context parallelism output_fn sees this rank's tokens, in logits and in the batch's
        tensors [B, T, ...]; what it returns for them, [B, T/cp, ...], is joined to [B, T, ...].
        Raises ValueError for a head and a batch without labels.
        """
        self.offloader.check_here("forward_step", "model")
        return forward(self, microbatches, output_fn, head)

    def forward_backward_step(
        self,
        *,
        input_dict: Microbatches,
        labels: torch.Tensor | Sequence[torch.Tensor],
        global_valid_tokens: torch.Tensor | float,
        loss_fn: Callable[[Any, torch.Tensor, Batch], torch.Tensor] | None = None,
        head: Head | None = None,
    ) -> torch.Tensor:
        """Accumulate gradients of one or several microbatches until `optim_step`.

        input_dict, labels: one batch and its labels [B, T] on every rank, or equally long lists
            of them. Data-parallel ranks may have lists of different lengths, empty ones too.
            Under pipeline parallelism one batch is split into microbatches of
            `pipeline_parallel_microbatch_size` rows, a list is taken as it is; all ranks of a
            pipeline give the same.
        global_valid_tokens: the loss denominator, counted over the whole global batch (all
            ranks, all microbatches).
        loss_fn: (logits [B, T, V], labels [B, T], batch) -> sum over tokens; default is the
            train spec's loss. It gets whole logits under tensor parallelism too, where the train
            spec's loss gets a DTensor split along V, unless `disable_loss_parallel` is set. Under
            context parallelism it sees this rank's tokens, as `forward_step`'s output_fn does.
        head: computed in place of logits, such as `TokenLogProbs()`; loss_fn gets its outputs.
            Without a loss_fn the loss is minus the sum of their log-probs.
        Returns this rank's sum divided by the denominator, fp32; summed over data- and
        context-parallel ranks it is the loss of the global batch. All ranks of a pipeline return
        the same.

        Raises ValueError for a second microbatch before `optim_step` under
        `optimizer.early_step_in_backward`, which cannot accumulate.

        Where this fails, with the same error on all ranks, the engine stays usable; gradients
        are those of a part of the microbatches then: call `optimizers.zero_grad()`.
        """
        self.offloader.check_here("forward_backward_step", "model", "grad")
        return forward_backward(self, input_dict, labels, global_valid_tokens, loss_fn, head)

    def optim_step(
        self,
        *,
        lr: float | None = None,
        max_norm: float | None = None,
        denominator: torch.Tensor | float | None = None,
    ) -> OptimStepResult:
        """Clip, update the weights, advance the schedule and zero the gradients.

        lr: the learning rate of this step alone, in place of the schedule's; of every parameter
            group.
        max_norm: clip this step's gradients to it instead of to `training.max_norm`.
        denominator: this rank's share of what the gradients are divided by first, for callers
            that learn it only while they go through the microbatches: its sum over the
            data-parallel ranks counts, or its mean, as `training.gradient_reduction` says.
            Where that is 0, nothing is divided.

        A norm that is not finite is handled by `training.nonfinite_grad_norm`: "skip" leaves
        weights and optimizer state as they are and goes on (at most 10 times in a row),
        "stop" raises FloatingPointError, "ignore" updates all the same.

        On an accelerator the optimizer leaves everything as it is by itself, and the host learns
        of it a step late: the warning and the error, and a ValueError for a `denominator` whose sum
        is negative or not finite, come with the next `optim_step` before it updates, or with the
        next `save` or look at `weights_version` if that is earlier. Hooks of the optimizers run in
        skipped steps, too. Optimizers other than "fused" have the host wait instead.
        Raises ValueError for any of the arguments under `optimizer.early_step_in_backward`.
        """
        self.offloader.check_here("optim_step", "model", "optimizer", "grad")
        self.update.refuse_late_arguments(lr=lr, max_norm=max_norm, denominator=denominator)
        self.runner.reshard()  # parameters that a client's forward left gathered have no gradients
        return self.update.step(
            lr,
            max_norm,
            denominator,
            number=lambda: self.step if self._caller_counts_steps else self._steps_done + 1,
            before_update=self.checkpointer.maybe_wait_for_staging,
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
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]
        # Older checkpoints count steps only.
        self.weights_version = state_dict.get("weights_version", self.step)
        self._loaded_step, self._loaded_version = self.step, self.weights_version
        self._counters_restored = True

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

    def load(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load a checkpoint, and return whether there was one. Collective.

        path: the folder of one checkpoint, DCP or Hugging Face files, and the only place that is
            looked at. None is what a run starts with: `checkpoint.load_step` of its own folder,
            else the initial checkpoint of the config.
        model_only: leave optimizer, schedule and counters as they are.

        Where `weights_version` is not restored, it goes up by one.
        """
        step = -1 if path is not None else self.job_config.checkpoint.load_step
        with contextlib.suppress(FloatingPointError, ValueError):
            self.update.settle()  # what was wrong with the last step goes with its weights
        self._counters_restored = False
        found = self.checkpointer.load(step, path=path, model_only=model_only)
        if found and not self._counters_restored:
            self.weights_version += 1
            self._loaded_version += 1  # no optimizer step
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
        if self.job_config.optimizer.early_step_in_backward:
            raise ValueError(
                "to(device) cannot move parameters whose optimizer steps in their gradient's "
                "hooks; set optimizer.early_step_in_backward = false"
            )
        if self.job_config.training.enable_cpu_offload and self.device.type != "cpu":
            warn_once(
                logger, "to(device) moves nothing: training.enable_cpu_offload keeps all on the CPU"
            )
            return
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
        schedule = self.pp_schedule
        return WeightStream(
            self.model_parts,
            self.checkpointer.require_adapter(),
            self.device,
            dtype=dtype,
            sharded=sharded,
            current_version=lambda: self.weights_version,
            stage_indices=[s.stage_index for s in schedule.stages] if schedule else None,
            pp_group=schedule.group if schedule else None,
        )

    def close(self) -> None:
        """Finish pending checkpoint writes and give back what was on loan. Safe to call twice."""
        try:
            if hasattr(self, "checkpointer"):  # the construction may have failed before it
                self.checkpointer.close()
        finally:
            host.move_out(self)
