"""The training engine: model, optimizer, schedule and checkpoints of one job, without data.

A program that brings its own batches, loss and loop builds a `TrainingEngine` inside its own
process; `torchtitan.train.Trainer` is this engine plus tokenizer, data, metrics and a loop.

Letters used below: B sequences, T tokens, V vocabulary entries.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.run_record import record_of
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.components.context_sharding import (
    ContextSharding,
    join_outputs,
    shard_batch,
    shards_of,
)
from torchtitan.components.fillers import (
    filler_batch,
    forget_counts,
    num_fillers,
    without_counting,
    zero_loss,
)
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.components.lr_scheduler import set_lrs
from torchtitan.components.offload import Offloader
from torchtitan.components.optimizer import skipped_where, skips_on_device
from torchtitan.components.packing import PackingPolicy, split_rows
from torchtitan.components.step_losses import SAMPLE_IDS, StepLosses
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import local_tensor, whole_tensor
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.job import resolve_job
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import host, host_copy, utils
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule

ENGINE_API_VERSION = 1

Batch = dict[str, Any]
"""`{"input": [B, T] token ids, "positions": [B, T] (optional), ...}`

Entries that the model's forward does not take reach `loss_fn` and `output_fn` alone.
"""

Head = Callable[..., Any]
"""What a decoder computes from hidden states in place of logits; see `components.logprobs`."""

MAX_SKIPPED_STEPS_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class _Microbatch:
    """What the model and the loss get of one microbatch, on the engine's device.

    inputs, kwargs: of the model's forward. labels: [B, T], or None. batch: the caller's entries.
    Under context parallelism all of them hold this rank's tokens alone, [B, T/cp].
    join: makes outputs of the rank's tokens those of whole rows; collective.
    is_filler: run only to keep step with ranks that have more microbatches.
    """

    inputs: torch.Tensor
    kwargs: Batch
    labels: torch.Tensor | None
    batch: Batch
    join: Callable[[Any], Any]
    is_filler: bool = False


@dataclasses.dataclass(frozen=True)
class OptimStepResult:
    """What one optimizer step did.

    grad_norm: the norm of all gradients before clipping, a tensor on the engine's device.
    lr: the learning rate that the step used.
    skipped: True if the norm was not finite and nothing was updated. On an accelerator the first
        read waits until the device has computed the norm.
    """

    grad_norm: torch.Tensor
    lr: float
    skipped: bool


class _LateOptimStepResult(OptimStepResult):
    """Of a step whose norm the device has looked at, and the host not yet."""

    def __init__(self, grad_norm: torch.Tensor, lr: float, verdict: "_Verdict"):
        self.__dict__.update(grad_norm=grad_norm, lr=lr, _verdict=verdict)

    @property
    def skipped(self) -> bool:
        return self._verdict.skipped


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What the device says of one step's gradients.

    read: returns [1 if the step was skipped, gradient norm, sum of the denominators]; waits for
        the device to have come so far.
    describe_losses: returns which microbatches had a bad loss.
    """

    step: int
    read: Callable[[], list[float]]
    describe_losses: Callable[[], str]

    @property
    def skipped(self) -> bool:
        return bool(self.read()[0])


def resolve_batch_size(job_config: JobConfig, dp_degree: int) -> tuple[int, int]:
    """Return (global batch size in sequences, gradient accumulation steps)."""
    local = job_config.training.local_batch_size
    global_size = job_config.training.global_batch_size
    if global_size < 0:
        global_size = local * dp_degree
    return global_size, global_size // (local * dp_degree)


@contextlib.contextmanager
def _on_error(repair: Callable[[], None]) -> Iterator[None]:
    """Call `repair` if the block fails. The block's error is raised, even if `repair` fails too."""
    try:
        yield
    except BaseException:
        try:
            repair()
        except Exception:
            # Where the device is lost, say, every further call fails as well.
            logger.exception("cleaning up after the error below failed; build a new engine")
        raise


def closed_on_error(engine: "TrainingEngine") -> contextlib.AbstractContextManager[None]:
    """Close the engine if its construction fails inside."""
    return _on_error(engine.close)


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
    tokenizer = None
    dataloader = None
    metrics_processor = None

    job_config: JobConfig
    parallel_dims: ParallelDims
    train_spec: TrainSpec
    model_parts: list[torch.nn.Module]
    checkpointer: CheckpointManager | None = None
    loss_fn: LossFunction
    step: int
    ntokens_seen: int

    # Makes sums, in steps of its own, of the means that a client's own backward has.
    _gradient_factor = 1.0

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
        job_config = self.job_config
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
        self._maybe_average_gradients()
        self._materialize()
        self._build_optimizers()
        self.step = 0
        self.ntokens_seen = 0
        self._verdict: _Verdict | None = None  # of the last step, until the host has read it
        self._step_losses = StepLosses()
        self._weights_version = 0
        self._loaded_step = self._loaded_version = 0
        self._skipped_in_a_row = 0
        self._num_early_steps = 0  # since the last optim_step
        self._more_follow = False
        self._defers_sync = job_config.training.defer_gradient_sync
        if self._defers_sync and self.pp_schedule is not None:
            logger.warning(
                "training.defer_gradient_sync has no effect under pipeline parallelism, whose "
                "schedule reduces gradients after the last microbatch of a call anyway"
            )
        self.checkpointer = self._build_checkpointer()
        self._build_contexts()

    # ---- construction, in the order of events ----

    def _set_device(self) -> torch.device:
        device_type, device_module = utils.get_device_info()
        if device_type == "cpu":
            return torch.device("cpu")
        # Without a launcher, the device that the host has chosen.
        index = os.environ.get("LOCAL_RANK")
        index = device_module.current_device() if index is None else int(index)
        if index >= device_module.device_count():
            raise ConfigError(
                f"LOCAL_RANK = {index} asks for device {index} of this machine, counted from 0, and "
                f"it shows {device_module.device_count()}; start as many processes on it as it has"
            )
        device = torch.device(device_type, index)
        host.change(
            "current device",
            device.index,
            write=device_module.set_device,
            read=device_module.current_device,
        )
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
            always_fsdp=self._is_fsdp_wanted_always(),
        )

    def _is_fsdp_wanted_always(self) -> bool:
        degrees = self.job_config.parallelism
        if degrees.always_fsdp is not None:
            return degrees.always_fsdp
        if self.train_spec.build_dataloader_fn is None:
            return True
        if self.device.type == "cpu" or degrees.data_parallel_replicate_degree > 1:
            return False
        # Autocast would keep an fp32 residual stream, and cast all weights in every step. Others'
        # functions may leave one rank's model as it is.
        parallelize = self.train_spec.parallelize_fn
        return getattr(parallelize, "__module__", None) == "torchtitan.models.parallelize"

    def _set_determinism(self) -> int:
        """Return the seed of the parameters. The host's generators are seeded only if it asked."""
        debug = self.job_config.debug
        if debug.seed is None:
            if debug.deterministic:
                dist_utils.use_deterministic_kernels(debug.deterministic_warn_only)
            return dist_utils.agree_on_seed(self.parallel_dims, self.device, debug)
        return dist_utils.set_determinism(
            self.parallel_dims,
            self.device,
            debug,
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

    def _maybe_average_gradients(self) -> None:
        """Whoever adds gradients up over ranks, under "mean" they are divided in backward."""
        if self.job_config.training.gradient_reduction == "sum" or self.dp_size == 1:
            return
        from torchtitan.distributed.fsdp import scale_gradients

        if self.pp_has_last_stage is not False:
            scale_gradients(self.model_parts[-1], 1 / self.dp_size)

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
        self.optimizers.register_step_post_hook(self._count_version)
        self._offloader = Offloader(self.model_parts, self.optimizers, self.device)
        # Offloaded gradients are on the host before the optimizer step: reading them is free.
        self._skips_on_device = (
            self.device.type != "cpu"
            and not config.training.enable_cpu_offload
            and skips_on_device(self.optimizers)
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
        checkpointer.run_record = record_of(self.job_config, self.global_batch_size, self.tokenizer)
        self._warn_of_shared_folder(checkpointer)
        return checkpointer

    def _warn_of_shared_folder(self, checkpointer: CheckpointManager) -> None:
        for other in host.engines():
            theirs = getattr(other, "checkpointer", None)
            if theirs is not None and checkpointer.saves_where(theirs):
                warn_once(
                    logger,
                    f"two engines of this process save in {checkpointer.folder} and overwrite and "
                    "remove each other's steps; give each a job.dump_folder or a "
                    "checkpoint.folder of its own",
                )

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
        return self._set_mode(training=True)

    def eval_mode(self) -> contextlib.ExitStack:
        """Put the model into evaluation mode, at once; as a context manager, until its end."""
        return self._set_mode(training=False)

    def _set_mode(self, training: bool) -> contextlib.ExitStack:
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

    # ---- one step ----

    def to_device(self, batch: Batch) -> Batch:
        """Copy of `batch` with its tensors on the engine's device; other values as they are."""
        return {
            key: host_copy.to_device(value, self.device)
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

    def _prepare(
        self, batch: Batch, labels: torch.Tensor | None = None, head: Head | None = None
    ) -> _Microbatch:
        seq_len = batch["input"].shape[1]
        if self.context_sharding is not None:
            batch, labels = self.context_sharding.pad(batch, labels)
        batch = self.to_device(batch)
        if labels is not None:
            labels = host_copy.to_device(labels, self.device)
        inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(batch, labels)
        kwargs = _taken_by(self.model_parts[0], extra_inputs | extra_kwargs)
        if head is not None:
            kwargs["head"] = functools.partial(head, labels=labels)
        if self.context_sharding is None:
            return _Microbatch(inputs, kwargs, labels, batch, join=lambda outputs: outputs)
        shards = shards_of(kwargs["attention_masks"])
        join = functools.partial(
            join_outputs, shards=shards, n_tokens=inputs.shape[1], seq_len=seq_len
        )
        return _Microbatch(inputs, kwargs, labels, shard_batch(batch, shards), join)

    def _num_fillers(self, microbatches: Batch | Sequence[Batch], n: int) -> Callable[[], int]:
        """How many microbatches this rank, with `n`, has fewer than others; see `num_fillers`.

        A single batch is what every rank has; for a list this is collective.
        """
        group = None if isinstance(microbatches, dict) else self.dp_group
        return num_fillers(n, group, self.device)

    def _fillers(self, n: int) -> list[_Microbatch]:
        """What to run after one's own microbatches until all data-parallel ranks are done."""
        if not n:
            return []
        batch, labels = filler_batch(
            self.job_config.training.seq_len, self.packing.separates_documents
        )
        return [dataclasses.replace(self._prepare(batch, labels), is_filler=True)] * n

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
        label_list = [None if head is None else _labels_of(batch) for batch in batches]
        for batch, labels in zip(batches, label_list, strict=True):
            _check_shapes(batch, labels)
        n_fillers = self._num_fillers(microbatches, len(batches))

        def output_of(logits: torch.Tensor, microbatch: _Microbatch) -> Any:
            logits = whole_tensor(logits)
            return microbatch.join(output_fn(logits, microbatch.batch) if output_fn else logits)

        with _on_error(self._recover_model_parts):
            if self.pp_schedule is not None:
                prepared = [
                    self._prepare(batch, labels, head)
                    for batch, labels in zip(batches, label_list, strict=True)
                ]
                outputs = self._pipeline_forward(prepared, self._fillers(n_fillers()), output_of)
            else:
                outputs = []
                (model,) = self.model_parts
                for batch, labels in zip(batches, label_list, strict=True):
                    microbatch = self._prepare(batch, labels, head)
                    with self.train_context(), self.maybe_enable_amp:
                        logits = model(microbatch.inputs, **microbatch.kwargs)
                        outputs.append(output_of(logits, microbatch))
                for filler in self._fillers(n_fillers()):
                    with self.train_context(), self.maybe_enable_amp:
                        model(filler.inputs, **filler.kwargs)
        # Without backward FSDP keeps units gathered, whose gradients nobody would see then.
        self._reshard()
        return outputs

    def _pipeline_forward(
        self,
        microbatches: list[_Microbatch],
        fillers: list[_Microbatch],
        output_of: Callable[[Any, _Microbatch], Any],
    ) -> list[Any] | None:
        outputs: list[Any] = []
        if microbatches or fillers:
            with self.train_context(), self.maybe_enable_amp:
                self.pp_schedule.eval(
                    **_schedule_inputs(microbatches + fillers),
                    losses=outputs,
                    loss_fn=lambda logits, mb: None if mb.is_filler else output_of(logits, mb),
                    return_outputs=False,
                )
        return outputs[: len(microbatches)] if self.pp_has_last_stage else None

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
            # What a loss function alone sees is its affair.
            _check_shapes(batch, batch_labels if loss_fn is None or head is not None else None)
        _check_denominator(global_valid_tokens)
        sample_ids = [getattr(batch["input"], SAMPLE_IDS, None) for batch in batches]
        if self.pp_schedule is not None and isinstance(input_dict, dict):
            n_rows = self.job_config.parallelism.pipeline_parallel_microbatch_size
            batches, label_list = split_rows(input_dict, label_list[0], n_rows)
            if sample_ids[0] is not None:
                sample_ids = sample_ids[0].split(n_rows)

        n_fillers = self._num_fillers(input_dict, len(batches))
        if self.job_config.optimizer.early_step_in_backward:
            self._prepare_early_step(len(batches) + n_fillers())

        def loss_of(logits: torch.Tensor, microbatch: _Microbatch) -> torch.Tensor:
            if microbatch.is_filler:
                return zero_loss(logits)
            if loss_fn is None and head is not None:
                loss = -logits.logprobs.sum()
            elif loss_fn is None:
                loss = self.loss_fn(logits, microbatch.labels)
            else:
                loss = loss_fn(whole_tensor(logits), microbatch.labels, microbatch.batch)
            return loss / global_valid_tokens

        with _on_error(self._recover_model_parts), _on_error(self._forget_microbatches):
            if self.pp_schedule is not None:
                # Every rank builds the masks of its stages for itself.
                prepared = [
                    self._prepare(batch, batch_labels, head)
                    for batch, batch_labels in zip(batches, label_list, strict=True)
                ]
                fillers = self._fillers(n_fillers())
                return self._pipeline_forward_backward(prepared + fillers, loss_of, sample_ids)
            losses = []
            for i, (batch, batch_labels) in enumerate(zip(batches, label_list, strict=True)):
                microbatch = self._prepare(batch, batch_labels, head)
                # Asked for after the others are queued, and only where the answer matters.
                is_last = i + 1 == len(batches) and not (self._defers_sync and n_fillers())
                with self._reducing_gradients(now=is_last):
                    losses.append(self._forward_backward(microbatch, loss_of))
            fillers = self._fillers(n_fillers())
            for i, filler in enumerate(fillers):
                with (
                    without_counting(self.model_parts),
                    self._reducing_gradients(now=i + 1 == len(fillers)),
                ):
                    self._forward_backward(filler, loss_of)
            return self._sum_of(losses, sample_ids)

    @contextlib.contextmanager
    def _more_microbatches_follow(self) -> Iterator[None]:
        """Calls of `forward_backward_step` inside are not the last ones before `optim_step`."""
        before, self._more_follow = self._more_follow, True
        try:
            yield
        finally:
            self._more_follow = before

    @contextlib.contextmanager
    def _reducing_gradients(self, now: bool) -> Iterator[None]:
        """Run a microbatch. Unless it is the last one its gradients may be reduced with the next's.

        now: it is the last of a call, and so of the step if none follows.
        """
        later = self._more_follow or not now
        # Without the key, what waits is the sum over HSDP's copies, in the trainer's own loop.
        is_cheap = self._more_follow and self.parallel_dims.dp_replicate_enabled
        if not (later and (self._defers_sync or is_cheap)):
            yield
            return
        from torchtitan.distributed.fsdp import reduce_later

        (model,) = self.model_parts
        keeps_weights = self.job_config.parallelism.fsdp_reshard_after_forward == "never"
        reduce_later(model, True, whole=self._defers_sync, keeps_weights=keeps_weights)
        try:
            yield
        finally:
            reduce_later(model, False, whole=self._defers_sync, keeps_weights=keeps_weights)

    def _forward_backward(
        self,
        microbatch: _Microbatch,
        loss_of: Callable[[Any, _Microbatch], torch.Tensor],
    ) -> torch.Tensor:
        (model,) = self.model_parts
        with self.train_context():
            with self.maybe_enable_amp:
                logits = model(microbatch.inputs, **microbatch.kwargs)
                loss = loss_of(logits, microbatch)
            del logits  # [B, T, V]: free before backward needs the memory
            (loss * self._gradient_factor).backward()
        return loss.detach()

    def _pipeline_forward_backward(
        self,
        prepared: list[_Microbatch],
        loss_of: Callable[[Any, _Microbatch], torch.Tensor],
        sample_ids: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if prepared:
            with self.train_context(), self.maybe_enable_amp:
                self.pp_schedule.step(
                    **_schedule_inputs(prepared),
                    losses=losses,
                    loss_fn=loss_of,
                    return_outputs=False,
                    context_mbs=[
                        functools.partial(without_counting, self.model_parts)
                        if microbatch.is_filler
                        else contextlib.nullcontext
                        for microbatch in prepared
                    ],
                )
        # Known on the rank of the last stage alone, wanted by all that log it.
        loss = self._sum_of([loss.detach() for loss in losses], sample_ids)
        return self.pp_schedule.broadcast_from_last_stage(loss)

    def _sum_of(
        self, losses: list[torch.Tensor], sample_ids: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """In fp32, whatever the loss function gave: ranks without a loss have to match it."""
        if not losses:
            return torch.zeros((), device=self.device)
        stacked = torch.stack(losses)
        self._step_losses.add(stacked, sample_ids)
        return stacked.sum(dtype=torch.float32)

    def _recover_model_parts(self) -> None:
        if self.parallel_dims.uses_fsdp:
            from torchtitan.distributed.fsdp import recover_model

            for part in self.model_parts:
                recover_model(part)

    def _forget_microbatches(self) -> None:
        self._num_early_steps = 0
        self._step_losses.clear()
        # Or the next step would balance experts by tokens whose gradients it never saw.
        forget_counts(self.model_parts)

    def _reshard(self) -> None:
        if "torch.distributed.fsdp" not in sys.modules:  # nobody has sharded anything
            return
        from torchtitan.distributed.fsdp import reshard_model

        for part in self.model_parts:
            reshard_model(part)

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
        self._refuse_after_early_step(lr=lr, max_norm=max_norm, denominator=denominator)
        self._reshard()  # parameters that a client's own forward left gathered have no gradients
        total = None if denominator is None else self._divide_gradients(denominator)
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.job_config.training.max_norm if max_norm is None else max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self._settle()  # the step before
        skip = self._is_to_skip(grad_norm, total)
        if skip is not None:
            numbers = [skip, grad_norm, torch.ones_like(grad_norm) if total is None else total]
            numbers = torch.stack([number.double() for number in numbers])
            step = self.step if self._caller_counts_steps else self._steps_done + 1
            describe_losses = self._step_losses.take()
            verdict = _Verdict(step, host_copy.read_later(numbers), describe_losses)
            self._verdict = verdict
            if not self._skips_on_device:
                self._settle()
        self.checkpointer.maybe_wait_for_staging()
        if lr is not None:
            for optimizer in self.optimizers:
                set_lrs(optimizer, [lr] * len(optimizer.param_groups))
        # Offloaded gradients have it on the host.
        grad_norm = grad_norm.to(self.device)
        lr = self.lr if lr is None else lr
        if skip is not None and self._skips_on_device:
            result = _LateOptimStepResult(grad_norm, lr, verdict)
            forget_counts(self.model_parts, where=skip)
            with skipped_where(self.optimizers, skip):
                self.optimizers.step()
        else:
            result = OptimStepResult(grad_norm, lr, skip is not None and verdict.skipped)
            if result.skipped:
                forget_counts(self.model_parts)
            else:
                self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad()
        self._num_early_steps = 0
        self._step_losses.clear()
        return result

    def _refuse_after_early_step(self, **arguments: Any) -> None:
        given = [name for name, value in arguments.items() if value is not None]
        if given and self.job_config.optimizer.early_step_in_backward:
            raise ValueError(
                f"optim_step({given[0]}=...) comes too late with "
                "optimizer.early_step_in_backward, which has updated the weights in backward; "
                "turn it off"
            )

    def _prepare_early_step(self, n_microbatches: int) -> None:
        """n_microbatches: with fillers, so that data-parallel ranks agree."""
        if self._num_early_steps + n_microbatches > 1:
            raise ValueError(
                "optimizer.early_step_in_backward updates the weights in every backward, so a step "
                f"has one microbatch, got number {self._num_early_steps + n_microbatches} before "
                "optim_step(); give one, or turn it off"
            )
        self._num_early_steps += n_microbatches
        self.checkpointer.maybe_wait_for_staging()  # backward will change the weights

    def _divide_gradients(self, denominator: torch.Tensor | float) -> torch.Tensor | None:
        """Return the sum of the denominators, an fp64 scalar, if only the device has looked at it."""
        total = torch.as_tensor(denominator).detach().reshape(())
        if self.dp_group is not None:
            if total.device.type == "cpu":  # a number is queued with the work, memory is copied
                total = torch.full((), total.item(), dtype=torch.float64, device=self.device)
            total = total.to(self.device, torch.float64, copy=True)
            torch.distributed.all_reduce(total, group=self.dp_group)
            if self.job_config.training.gradient_reduction == "mean":
                total /= self.dp_size
        parameters = [p for part in self.model_parts for p in part.parameters()]
        grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        if not self._skips_on_device or total.device.type != self.device.type:
            divisor = total.item()  # known to the host, or waited for
            if not 0 <= divisor < math.inf:
                raise ValueError(_refused_denominator(divisor))
            if grads and divisor > 0:
                torch._foreach_div_(grads, divisor)
            return None
        if grads:
            divisor = total + (total == 0)  # 1 for 0; torch.where would copy the number over
            torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        return total.double()

    def _is_to_skip(
        self, grad_norm: torch.Tensor, total: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Whether the optimizers must leave everything as it is, a bool on the gradients' device.

        None if they need not ask. total: what `_divide_gradients` returned.
        """
        skip = None
        # Steps in backward have been made already.
        may_skip = not self.job_config.optimizer.early_step_in_backward
        if may_skip and self.job_config.training.nonfinite_grad_norm != "ignore":
            skip = ~torch.isfinite(grad_norm)
        if total is not None:
            is_refused = ~(torch.isfinite(total) & (total >= 0))
            skip = is_refused if skip is None else skip | is_refused
        return skip

    def _settle(self) -> None:
        """Count, report or raise what the device said of the last step.

        Waits until the device has computed that step's gradient norm, and not for its update.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        skipped, norm, total = verdict.read()
        if not skipped:
            self._skipped_in_a_row = 0
            return
        if self._skips_on_device:
            self._weights_version -= 1  # that the optimizers' hooks have counted
        if not 0 <= total < math.inf:
            raise ValueError(f"step {verdict.step}: {_refused_denominator(total)}")
        self._skipped_in_a_row += 1
        what = f"step {verdict.step}: the gradient norm is {norm}"
        losses = verdict.describe_losses()
        policy = self.job_config.training.nonfinite_grad_norm
        if policy == "stop" or self._skipped_in_a_row > MAX_SKIPPED_STEPS_IN_A_ROW:
            raise FloatingPointError(
                f"{what}, {self._skipped_in_a_row} time(s) in a row; {losses}; lower optimizer.lr, "
                "look at the data of this step, or set training.nonfinite_grad_norm"
            )
        logger.warning(
            "%s; %s; weights and optimizer state were left as they are",
            what,
            losses,
            extra=event("skipped step", verdict.step),
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
        """Counts changes of the weights: optimizer steps, and loads that bring weights alone.

        Waits for what the device says of the last step, and raises as the next `optim_step` would.
        """
        self._settle()
        return self._weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._weights_version = version

    def _count_version(self, *_args: Any, **_kwargs: Any) -> None:
        self._weights_version += 1

    def save(self, path: str | None = None, *, force: bool = True) -> None:
        """Save model, optimizer, schedule and counters. Collective.

        path: the folder to write, itself; retention leaves it alone. None is a step folder of
            `checkpoint.folder`, named after `step`, or after the optimizer steps where nobody
            counts there.
        force: False leaves out what is not due: without `checkpoint.enable` everything, and with
            a dataloader what `checkpoint.interval` says. Without one, every save is due.
        """
        self._settle()
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
            self._settle()  # what was wrong with the last step goes with its weights
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
            if self.checkpointer is not None:
                self.checkpointer.close()
        finally:
            host.move_out(self)


def _schedule_inputs(prepared: list[_Microbatch]) -> dict[str, list[Any]]:
    """What a pipeline schedule's `step` and `eval` take; its loss function gets the microbatch."""
    return {
        "arg_mbs": [(microbatch.inputs,) for microbatch in prepared],
        "kwarg_mbs": [microbatch.kwargs for microbatch in prepared],
        "input_shapes": [tuple(microbatch.inputs.shape[:2]) for microbatch in prepared],
        "target_mbs": prepared,
    }


def _taken_by(model: torch.nn.Module, entries: Batch) -> Batch:
    """The entries that the model's forward has a keyword for; all if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return entries
    return {key: value for key, value in entries.items() if key in parameters}


def _check_shapes(batch: Batch, labels: torch.Tensor | None) -> None:
    tokens = batch.get("input")
    if not isinstance(tokens, torch.Tensor):
        raise ValueError(
            f"a microbatch needs 'input', a tensor of token ids [B, T], got {type(tokens).__name__} "
            f"there and the keys {sorted(batch)}; put the tokens under 'input'"
        )
    if tokens.dim() < 2:
        raise ValueError(
            f"a microbatch's 'input' must be rows of token ids [B, T], got shape "
            f"{tuple(tokens.shape)}; give a single row as input[None]"
        )
    if labels is not None and labels.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"labels must have the shape of 'input' [B, T], got {tuple(labels.shape)} for "
            f"{tuple(tokens.shape)}; give each token its target, {IGNORE_INDEX} where it has none"
        )


def _check_denominator(global_valid_tokens: torch.Tensor | float) -> None:
    """One on an accelerator is not looked at, which would wait for it."""
    if isinstance(global_valid_tokens, torch.Tensor) and global_valid_tokens.device.type != "cpu":
        return
    if not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )


def _refused_denominator(total: float) -> str:
    return (
        "optim_step's denominator must add up to a finite number, 0 or more, over the "
        f"data-parallel ranks, got {total}"
    )


def _labels_of(batch: Batch) -> torch.Tensor:
    if batch.get("labels") is None:
        raise ValueError(
            f"forward_step with a head needs the batch's 'labels' [B, T], got {sorted(batch)}; put "
            "the token ids there whose log-probs are wanted, IGNORE_INDEX where none is"
        )
    return batch["labels"]


def _as_list(microbatches: Batch | Iterable[Batch]) -> list[Batch]:
    return [microbatches] if isinstance(microbatches, dict) else list(microbatches)
