"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program that brings its own batches, loss and loop builds a `TrainingEngine` inside its own
process; `torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

Letters used below: B sequences, T tokens, V vocabulary entries.
"""

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.context_sharding import (
    ContextSharding,
    join_outputs,
    shard_batch,
    shards_of,
)
from torchtitan.components.loss import LossFunction
from torchtitan.components.packing import PackingPolicy, split_rows
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.job import resolve_job
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

ENGINE_API_VERSION = 1

Batch = dict[str, Any]
"""`{"input": [B, T] token ids, "positions": [B, T] (optional), ...}`"""

MAX_SKIPPED_STEPS_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class _Microbatch:
    """What the model and the loss get of one microbatch, on the engine's device.

    inputs, kwargs: of the model's forward. labels: [B, T], or None. batch: the caller's entries.
    Under context parallelism all of them hold this rank's tokens alone, [B, T/cp].
    join: makes outputs of the rank's tokens those of whole rows; collective.
    """

    inputs: torch.Tensor
    kwargs: Batch
    labels: torch.Tensor | None
    batch: Batch
    join: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class OptimStepResult:
    """What one optimizer step did.

    grad_norm: the norm of all gradients before clipping, a tensor on the engine's device.
    lr: the learning rate that the step used.
    skipped: True if the norm was not finite and nothing was updated.
    """

    grad_norm: torch.Tensor
    lr: float
    skipped: bool


def resolve_batch_size(job_config: JobConfig, dp_degree: int) -> tuple[int, int]:
    """Return (global batch size in sequences, gradient accumulation steps)."""
    local = job_config.training.local_batch_size
    global_size = job_config.training.global_batch_size
    if global_size < 0:
        global_size = local * dp_degree
    return global_size, global_size // (local * dp_degree)


class TrainingEngine:
    """Everything between a config and an optimizer step, wired once.

    Never builds a tokenizer, dataloader or validator. An existing default process group is
    reused. The config is checked here, before a device or a process group is touched, and
    never written to.

    Raises ConfigError for a config that cannot run.
    """

    # Trainer replaces these; an engine has no data.
    tokenizer = None
    dataloader = None
    metrics_processor = None

    job_config: JobConfig
    parallel_dims: ParallelDims
    train_spec: TrainSpec
    model_parts: list[torch.nn.Module]
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

        self.train_spec = resolve_job(job_config)
        self.device = self._set_device()
        self.parallel_dims = self.init_distributed()
        self.context_sharding = ContextSharding.of(self.parallel_dims, job_config.parallelism)
        job_config.maybe_log()
        self.seed = self._set_determinism()
        self.build_data()
        self.model_args = self._derive_model_args()
        model = self._build_meta_model()
        self._count_parameters(model)
        self.global_batch_size, self.gradient_accumulation_steps = resolve_batch_size(
            job_config, self.dp_size
        )
        self.loss_fn = self.train_spec.build_loss_fn(job_config, parallel_dims=self.parallel_dims)
        self.model_parts = self._parallelize(model)
        self._materialize()
        self._build_optimizers()
        self.step = 0
        self.ntokens_seen = 0
        self._skipped_in_a_row = 0
        self.checkpointer = self._build_checkpointer()
        self._build_contexts()

    # ---- construction, in the order of events ----

    def _set_device(self) -> torch.device:
        device_type, device_module = utils.get_device_info()
        if device_type == "cpu":
            return torch.device("cpu")
        device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
        device_module.set_device(device)
        return device

    def init_distributed(self) -> ParallelDims:
        """Join or reuse the process group and return the layout of ranks."""
        config = self.job_config
        world_size = dist_utils.init_distributed(
            config.comm,
            enable_cpu_backend=config.training.enable_cpu_offload,
            base_folder=config.job.dump_folder,
        )
        degrees = config.parallelism
        return ParallelDims(
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=degrees.context_parallel_degree,
            tp=degrees.tensor_parallel_degree,
            pp=degrees.pipeline_parallel_degree,
            ep=degrees.expert_parallel_degree,
            etp=degrees.expert_tensor_parallel_degree,
            world_size=world_size,
        )

    def _set_determinism(self) -> int:
        return dist_utils.set_determinism(
            self.parallel_dims,
            self.device,
            self.job_config.debug,
            distinct_seed_mesh_dims=["pp"],
        )

    def build_data(self) -> None:
        """Hook for subclasses that own data; called before the model is built."""

    def _derive_model_args(self):
        # The flavor table is shared by every trainer of this process: derive on a copy.
        model_args = copy.deepcopy(self.train_spec.model_args[self.job_config.model.flavor])
        model_args.update_from_config(self.job_config)
        logger.info(
            "model %s %s: %s",
            self.job_config.model.name,
            self.job_config.model.flavor,
            json.dumps(dataclasses.asdict(model_args), default=str),
        )
        return model_args

    def _build_meta_model(self) -> torch.nn.Module:
        dtype = TORCH_DTYPE_MAP[self.job_config.training.dtype]
        with torch.device("meta"), utils.set_default_dtype(dtype):
            model = self.train_spec.model_cls(self.model_args)
        self.model_converters = build_model_converters(self.job_config, self.parallel_dims)
        self.model_converters.convert(model)
        return model

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

    def _parallelize(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        spec, dims, config = self.train_spec, self.parallel_dims, self.job_config
        if not dims.pp_enabled:
            return [spec.parallelize_fn(model, dims, config)]
        self.pp_schedule, parts, self.pp_has_first_stage, self.pp_has_last_stage = (
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
        return parts

    def _materialize(self) -> None:
        """Allocate the parameters and fill them from the seed; the layout changes no bit."""
        if self.job_config.checkpoint.create_seed_checkpoint:
            init_device, buffer_device = torch.device("cpu"), None
        elif self.job_config.training.enable_cpu_offload and self.device.type != "cpu":
            init_device, buffer_device = torch.device("cpu"), self.device
        else:
            init_device, buffer_device = self.device, None
        for part in self.model_parts:
            part.to_empty(device=init_device)
            with torch.no_grad(), seeded_init(part, self.seed):
                part.init_weights(buffer_device=buffer_device)
            part.train()

    def _build_optimizers(self) -> None:
        config = self.job_config
        self.optimizers = self.train_spec.build_optimizers_fn(
            self.model_parts, config.optimizer, self.parallel_dims
        )
        self.lr_schedulers = self.train_spec.build_lr_schedulers_fn(
            self.optimizers, config.lr_scheduler, config.training.steps
        )
        self.optimizers.register_step_post_hook(
            lambda *_args, **_kwargs: self.model_converters.post_optimizer_hook(self.model_parts)
        )

    def _build_checkpointer(self) -> CheckpointManager:
        adapter_cls = self.train_spec.state_dict_adapter
        checkpointer = CheckpointManager(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=self.job_config.checkpoint,
            sd_adapter=(
                adapter_cls(self.model_args, self.job_config.model.hf_assets_path)
                if adapter_cls
                else None
            ),
            base_folder=self.job_config.job.dump_folder,
        )
        model = self.job_config.model
        checkpointer.model_description = f"{model.name} {model.flavor}"
        return checkpointer

    def _build_contexts(self) -> None:
        self.train_context = dist_utils.get_train_context(
            self.parallel_dims.tp_enabled and not self.job_config.parallelism.disable_loss_parallel
        )
        self.maybe_enable_amp = dist_utils.maybe_enable_amp(
            self.parallel_dims,
            self.job_config.training.mixed_precision_param,
            self.device.type,
        )

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
    def packing(self) -> PackingPolicy:
        """How documents in a batch are told apart; follows a tokenizer that is set later."""
        return PackingPolicy.of(self.job_config.training, self.model_args, self.tokenizer)

    # ---- one step ----

    def to_device(self, batch: Batch) -> Batch:
        """Copy of `batch` with its tensors on the engine's device; other values as they are."""
        return {
            key: value.to(self.device, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in batch.items()
        }

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

    def _prepare(self, batch: Batch, labels: torch.Tensor | None = None) -> _Microbatch:
        batch = self.to_device(batch)
        if labels is not None:
            labels = labels.to(self.device, non_blocking=True)
        seq_len = batch["input"].shape[1]
        if self.context_sharding is not None:
            batch, labels = self.context_sharding.pad(batch, labels)
        inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(batch, labels)
        kwargs = extra_inputs | extra_kwargs
        if self.context_sharding is None:
            return _Microbatch(inputs, kwargs, labels, batch, join=lambda outputs: outputs)
        shards = shards_of(kwargs["attention_masks"])
        join = functools.partial(
            join_outputs, shards=shards, n_tokens=inputs.shape[1], seq_len=seq_len
        )
        return _Microbatch(inputs, kwargs, labels, shard_batch(batch, shards), join)

    @torch.no_grad()
    def forward_step(
        self,
        microbatches: Batch | Sequence[Batch],
        *,
        output_fn: Callable[[torch.Tensor, Batch], Any] | None = None,
    ) -> list[Any] | None:
        """Return the model's output for each microbatch, in order, without gradients.

        microbatches: one batch or a list of them; rows and T may differ between them.
        output_fn: applied to (logits [B, T, V], batch) on the spot, so that logits need not
            be kept; its results are returned instead.

        Under pipeline parallelism None on the ranks without the last stage. Microbatches are
        not split then, so give several: one alone is at work on one stage at a time.
        Under context parallelism output_fn sees this rank's tokens, in logits and in the batch's
        tensors [B, T, ...]; what it returns for them, [B, T/cp, ...], is joined to [B, T, ...].
        """
        batches = _as_list(microbatches)

        def output_of(logits: torch.Tensor, microbatch: _Microbatch) -> Any:
            logits = whole_tensor(logits)
            return microbatch.join(output_fn(logits, microbatch.batch) if output_fn else logits)

        outputs: list[Any] = []
        if self.pp_schedule is not None:
            prepared = [self._prepare(batch) for batch in batches]
            with self.train_context(), self.maybe_enable_amp:
                self.pp_schedule.eval(
                    **_schedule_inputs(prepared),
                    losses=outputs,
                    loss_fn=output_of,
                    return_outputs=False,
                )
            return outputs if self.pp_has_last_stage else None
        (model,) = self.model_parts
        for batch in batches:
            microbatch = self._prepare(batch)
            with self.train_context(), self.maybe_enable_amp:
                logits = model(microbatch.inputs, **microbatch.kwargs)
                outputs.append(output_of(logits, microbatch))
        return outputs

    def forward_backward_step(
        self,
        *,
        input_dict: Batch | Sequence[Batch],
        labels: torch.Tensor | Sequence[torch.Tensor],
        global_valid_tokens: torch.Tensor | float,
        loss_fn: Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Accumulate gradients of one or several microbatches until `optim_step`.

        input_dict, labels: one batch and its labels [B, T], or equally long lists of them.
            Under pipeline parallelism one batch is split into microbatches of
            `pipeline_parallel_microbatch_size` rows, a list is taken as it is; all ranks of a
            pipeline give the same.
        global_valid_tokens: the loss denominator, counted over the whole global batch (all
            ranks, all microbatches).
        loss_fn: (logits [B, T, V], labels [B, T], batch) -> sum over tokens; default is the
            train spec's loss. It gets whole logits under tensor parallelism too, where the train
            spec's loss gets a DTensor split along V, unless `disable_loss_parallel` is set. Under
            context parallelism it sees this rank's tokens, as `forward_step`'s output_fn does.
        Returns this rank's sum divided by the denominator; summed over data- and context-parallel
        ranks it is the loss of the global batch. All ranks of a pipeline return the same.
        """
        batches = _as_list(input_dict)
        label_list = [labels] if isinstance(labels, torch.Tensor) else list(labels)
        if len(batches) != len(label_list):
            raise ValueError(
                f"input_dict has {len(batches)} microbatches and labels {len(label_list)}; "
                "give one labels tensor per microbatch"
            )
        if self.pp_schedule is not None and isinstance(input_dict, dict):
            n_rows = self.job_config.parallelism.pipeline_parallel_microbatch_size
            batches, label_list = split_rows(input_dict, label_list[0], n_rows)

        def loss_of(logits: torch.Tensor, microbatch: _Microbatch) -> torch.Tensor:
            if loss_fn is None:
                loss = self.loss_fn(logits, microbatch.labels)
            else:
                loss = loss_fn(whole_tensor(logits), microbatch.labels, microbatch.batch)
            return loss / global_valid_tokens

        if self.pp_schedule is not None:
            return self._pipeline_forward_backward(batches, label_list, loss_of)
        (model,) = self.model_parts
        losses = []
        for batch, batch_labels in zip(batches, label_list, strict=True):
            microbatch = self._prepare(batch, batch_labels)
            with self.train_context():
                with self.maybe_enable_amp:
                    logits = model(microbatch.inputs, **microbatch.kwargs)
                    loss = loss_of(logits, microbatch)
                del logits  # [B, T, V]: free before backward needs the memory
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _pipeline_forward_backward(
        self,
        batches: list[Batch],
        label_list: list[torch.Tensor],
        loss_of: Callable[[torch.Tensor, _Microbatch], torch.Tensor],
    ) -> torch.Tensor:
        # Every rank builds the masks of its stages for itself.
        prepared = [
            self._prepare(batch, labels) for batch, labels in zip(batches, label_list, strict=True)
        ]
        losses: list[torch.Tensor] = []
        with self.train_context(), self.maybe_enable_amp:
            self.pp_schedule.step(
                **_schedule_inputs(prepared), losses=losses, loss_fn=loss_of, return_outputs=False
            )
        loss = torch.zeros((), device=self.device)
        if self.pp_has_last_stage:
            loss += torch.stack(losses).detach().sum()
        # Known on the rank of the last stage alone, wanted by all that log it.
        return self.pp_schedule.broadcast_from_last_stage(loss)

    def optim_step(self) -> OptimStepResult:
        """Clip, update the weights, advance the schedule and zero the gradients.

        A norm that is not finite is handled by `training.nonfinite_grad_norm`: "skip" leaves
        weights and optimizer state as they are and goes on (at most 10 times in a row),
        "stop" raises FloatingPointError, "ignore" updates all the same.
        """
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        skipped = self._is_step_to_skip(grad_norm)
        self.checkpointer.maybe_wait_for_staging()
        if not skipped:
            self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad()
        return OptimStepResult(grad_norm, lr, skipped)

    def _is_step_to_skip(self, grad_norm: torch.Tensor) -> bool:
        policy = self.job_config.training.nonfinite_grad_norm
        # isfinite() waits for the device; "ignore" doesn't.
        if policy == "ignore" or bool(torch.isfinite(grad_norm)):
            self._skipped_in_a_row = 0
            return False
        self._skipped_in_a_row += 1
        what = f"step {self.step}: the gradient norm is {grad_norm.item()}"
        if policy == "stop" or self._skipped_in_a_row > MAX_SKIPPED_STEPS_IN_A_ROW:
            raise FloatingPointError(
                f"{what}, {self._skipped_in_a_row} time(s) in a row; lower optimizer.lr, look at "
                "the data of this step, or set training.nonfinite_grad_norm"
            )
        logger.warning("%s; weights and optimizer state were left as they are", what)
        return True

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]

    def close(self) -> None:
        """Finish pending checkpoint writes and release helpers. Safe to call twice."""
        if getattr(self, "checkpointer", None):
            self.checkpointer.close()


def _schedule_inputs(prepared: list[_Microbatch]) -> dict[str, list[Any]]:
    """What a pipeline schedule's `step` and `eval` take; its loss function gets the microbatch."""
    return {
        "arg_mbs": [(microbatch.inputs,) for microbatch in prepared],
        "kwarg_mbs": [microbatch.kwargs for microbatch in prepared],
        "input_shapes": [tuple(microbatch.inputs.shape[:2]) for microbatch in prepared],
        "target_mbs": prepared,
    }


def _as_list(microbatches: Batch | Iterable[Batch]) -> list[Batch]:
    return [microbatches] if isinstance(microbatches, dict) else list(microbatches)
