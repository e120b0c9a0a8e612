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
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.documents import SAMPLE_IDS
from torchtitan.batch.fillers import filler_batch
from torchtitan.batch.packing import PackingPolicy, split_rows
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.job import resolve_job
from torchtitan.loss.cross_entropy import LossFunction
from torchtitan.optim.offload import Offloader
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.step.checks import check_denominator, check_shapes, labels_of
from torchtitan.step.runner import Batch, Head, Microbatch, Runner, on_error
from torchtitan.step.update import OptimStepResult, Update
from torchtitan.tools import host
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

ENGINE_API_VERSION = 1


def closed_on_error(engine: "TrainingEngine") -> contextlib.AbstractContextManager[None]:
    """Close the engine if its construction fails inside."""
    return on_error(engine.close)


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

    job_config: JobConfig
    parallel_dims: ParallelDims
    train_spec: TrainSpec
    model_parts: list[torch.nn.Module]
    checkpointer: CheckpointManager
    loss_fn: LossFunction
    step: int
    ntokens_seen: int

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
        with closed_on_error(self):
            self._build()

    def _build(self) -> None:
        config, spec = self.job_config, self.train_spec
        training, degrees = config.training, config.parallelism
        self.device = build.set_device()
        self.parallel_dims = self.init_distributed()
        self.context_sharding = ContextSharding.of(self.parallel_dims, degrees)
        config.maybe_log()
        self.seed = build.choose_seed(config, self.parallel_dims, self.device)
        self.build_data()
        self.model_args = build.derive_model_args(config, spec)
        model, self.model_converters = build.build_on_meta(
            config, spec, self.model_args, self.parallel_dims
        )
        self._count_parameters(model)
        self.global_batch_size = training.global_batch_size
        if self.global_batch_size < 0:
            self.global_batch_size = training.local_batch_size * self.dp_size
        rows_at_once = training.local_batch_size * self.dp_size
        self.gradient_accumulation_steps = self.global_batch_size // rows_at_once
        self.loss_fn = spec.build_loss_fn(config, parallel_dims=self.parallel_dims)
        self._parallelize(model)
        gradient_factor = self._average_gradients()
        build.materialize(self.model_parts, config, self.device, self.seed)

        self.optimizers = spec.build_optimizers_fn(
            self.model_parts, config.optimizer, self.parallel_dims
        )
        self.lr_schedulers = spec.build_lr_schedulers_fn(
            self.optimizers, config.lr_scheduler, training.steps
        )
        self.optimizers.register_step_post_hook(
            lambda *_args, **_kwargs: self.model_converters.post_optimizer_hook(self.model_parts)
        )
        self._offloader = Offloader(self.model_parts, self.optimizers, self.device)
        self.update = Update(
            config,
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            self.parallel_dims,
            self.device,
            self.dp_group,
        )
        self.step = self.ntokens_seen = 0
        self._loaded_step = self._loaded_version = 0
        self.checkpointer = build.build_checkpointer(self)

        if training.defer_gradient_sync and self.pp_schedule is not None:
            logger.warning(
                "training.defer_gradient_sync has no effect under pipeline parallelism, whose "
                "schedule reduces gradients after the last microbatch of a call anyway"
            )
        self.train_context = dist_utils.get_train_context(
            self.parallel_dims.tp_enabled and not degrees.disable_loss_parallel
        )
        self.maybe_enable_amp = dist_utils.maybe_enable_amp(
            self.parallel_dims, training.mixed_precision_param, self.device.type
        )
        self.runner = Runner(
            self.model_parts,
            self.device,
            lambda batch, labels: self.post_dataloading_process(batch, labels),
            self.train_context,
            self.maybe_enable_amp,
            sharding=self.context_sharding,
            schedule=self.pp_schedule,
            has_last_stage=self.pp_has_last_stage is not False,
            defers_reduction=training.defer_gradient_sync and self.pp_schedule is None,
            has_replicas=self.parallel_dims.dp_replicate_enabled,
            keeps_weights=degrees.fsdp_reshard_after_forward == "never",
            gradient_factor=gradient_factor,
            dp_group=self.dp_group,
            filler=lambda: filler_batch(training.seq_len, self.packing.separates_documents),
        )

    def init_distributed(self) -> ParallelDims:
        """Join or reuse the process group and return the layout of ranks."""
        return build.join_ranks(self.job_config, self.train_spec, self.device)

    def build_data(self) -> None:
        """Hook for subclasses that own data; called before the model is built."""

    def _count_parameters(self, model: torch.nn.Module) -> None:
        seq_len = self.job_config.training.seq_len
        count = self.model_args.get_nparams_and_flops
        self.num_params, self.num_flops_per_token = count(model, seq_len)
        self._flops_without_attention = count(model, 0)[1]
        logger.info("model size: %s parameters", f"{self.num_params:,}")

    def flops_per_token(self, attended_length: float) -> float:
        """FLOPs of a token whose attention spans so many tokens; `num_flops_per_token` if seq_len."""
        attention = self.num_flops_per_token - self._flops_without_attention
        share = attended_length / self.job_config.training.seq_len
        return self._flops_without_attention + share * attention

    def _parallelize(self, model: torch.nn.Module) -> None:
        spec, dims, config = self.train_spec, self.parallel_dims, self.job_config
        if not dims.pp_enabled:
            self.model_parts = [spec.parallelize_fn(model, dims, config)]
            return
        assert spec.pipelining_fn is not None, "the config's checks have looked"
        self.pp_schedule, self.model_parts, self.pp_has_first_stage, self.pp_has_last_stage = (
            spec.pipelining_fn(
                model,
                dims,
                config,
                self.device,
                self.model_args,
                spec.parallelize_fn,
                self.loss_fn,
            )
        )

    def _average_gradients(self) -> float:
        """Under "mean", gradients are divided in backward, whatever sums them over ranks.

        Returns what every loss is multiplied by to make up for other divisions in backward.
        """
        if self.job_config.training.gradient_reduction == "mean" and self.dp_size > 1:
            from torchtitan.distributed.fsdp import scale_gradients

            if self.pp_has_last_stage is not False:
                scale_gradients(self.model_parts[-1], 1 / self.dp_size)
        return 1.0

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
        return self.lr_schedulers.schedulers[0].get_last_lr()[0]

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
        return self.runner.to_device(batch)

    def post_dataloading_process(
        self, input_dict: Batch, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Batch, Batch]:
        """Return (inputs [B, T], labels, extra_inputs, extra_kwargs) for the model's forward.

        Every pipeline stage gets both of the last two: positions and masks come in either. Under
        context parallelism all hold this rank's tokens, [B, T/cp].
        """
        inputs, extra_inputs, extra_kwargs = self.packing.model_inputs(
            self.model_parts[0], input_dict, self.tokenizer
        )
        if self.context_sharding is not None:
            return self.context_sharding.shard(inputs, labels, extra_inputs, extra_kwargs)
        return inputs, labels, extra_inputs, extra_kwargs

    @torch.no_grad()
    def forward_step(
        self,
        microbatches: Batch | Sequence[Batch],
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
        self._offloader.check_here("forward_step", "model")
        batches = _as_list(microbatches)
        label_list = [None if head is None else labels_of(batch) for batch in batches]
        for batch, labels in zip(batches, label_list, strict=True):
            check_shapes(batch, labels)
        n_fillers = self.runner.ask_num_fillers(len(batches), isinstance(microbatches, dict))

        def output_of(logits: torch.Tensor, microbatch: Microbatch) -> Any:
            logits = whole_tensor(logits)
            return microbatch.join(output_fn(logits, microbatch.batch) if output_fn else logits)

        prepared = self.runner.microbatches(batches, label_list, head, n_fillers)
        return self.runner.run(prepared, output_of)

    def forward_backward_step(
        self,
        *,
        input_dict: Batch | Sequence[Batch],
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
        self._offloader.check_here("forward_backward_step", "model", "grad")
        batches = _as_list(input_dict)
        label_list = [labels] if isinstance(labels, torch.Tensor) else list(labels)
        if len(batches) != len(label_list):
            raise ValueError(
                f"input_dict has {len(batches)} microbatches and labels {len(label_list)}; "
                "give one labels tensor per microbatch"
            )
        for batch, batch_labels in zip(batches, label_list, strict=True):
            # What only a loss function sees may have any shape.
            check_shapes(batch, batch_labels if loss_fn is None or head is not None else None)
        check_denominator(global_valid_tokens)
        sample_ids = [getattr(batch["input"], SAMPLE_IDS, None) for batch in batches]
        if self.pp_schedule is not None and isinstance(input_dict, dict):
            n_rows = self.job_config.parallelism.pipeline_parallel_microbatch_size
            batches, label_list = split_rows(input_dict, label_list[0], n_rows)
            if sample_ids[0] is not None:
                sample_ids = sample_ids[0].split(n_rows)

        n_fillers = self.runner.ask_num_fillers(len(batches), isinstance(input_dict, dict))
        if self.job_config.optimizer.early_step_in_backward:
            self.update.prepare_early_step(len(batches) + n_fillers())
            self.checkpointer.maybe_wait_for_staging()  # backward will change the weights

        def loss_of(logits: Any, microbatch: Microbatch) -> torch.Tensor:
            if loss_fn is None and head is not None:
                loss = -logits.logprobs.sum()
            elif loss_fn is None:
                loss = self.loss_fn(logits, microbatch.labels)
            else:
                assert microbatch.labels is not None, (
                    "forward_backward_step gives each microbatch its labels"
                )
                loss = loss_fn(whole_tensor(logits), microbatch.labels, microbatch.batch)
            return loss / global_valid_tokens

        with on_error(self.update.forget_microbatches):
            prepared = self.runner.microbatches(
                batches, label_list, head, n_fillers, reduce_with_last=True
            )
            losses = self.runner.run(prepared, loss_of, backward=True)
            # In fp32, whatever the loss function gave: ranks without a loss have to match it.
            loss = torch.zeros((), device=self.device)
            if losses:
                stacked = torch.stack(losses)
                self.update.losses.add(stacked, sample_ids)
                loss = stacked.sum(dtype=torch.float32)
            if self.pp_schedule is not None:
                # Only the rank of the last stage knows it, and all ranks log it.
                loss = self.pp_schedule.broadcast_from_last_stage(loss)
            return loss

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
        self._offloader.check_here("optim_step", "model", "optimizer", "grad")
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
        target = self._offloader.check_target(device)
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
        self._offloader.move(target, model=model, optimizer=optimizer, grad=grad)

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


def _as_list(microbatches: Batch | Sequence[Batch]) -> list[Batch]:
    return [microbatches] if isinstance(microbatches, dict) else list(microbatches)
