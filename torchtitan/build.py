"""From a config and a train spec to the parts of an engine, in the order of events."""

import copy
import dataclasses
import json
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from torchtitan.batch.context import ContextSharding
from torchtitan.batch.fillers import filler_batch
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.run_record import record_of
from torchtitan.checkpoint.states import LR_SCHEDULER, OPTIMIZER
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks.common import has_value_head
from torchtitan.config.job_config import Training
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.determinism import (
    agree_on_seed,
    set_determinism,
    use_deterministic_kernels,
)
from torchtitan.distributed.failure_watch import Alone, watch_over
from torchtitan.distributed.fsdp import scale_gradients
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.loss.cross_entropy import LossFunction
from torchtitan.models.hf_config import from_hf_config
from torchtitan.numerics.products import use_onednn
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.offload import Offloader
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.rank_layout import RankLayout, has_last_stage, set_device
from torchtitan.step.runner import Runner
from torchtitan.step.update import Update
from torchtitan.tools import host, utils
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule


class EngineParts:
    """What `build_engine` makes, in this order, and what is read off it."""

    layout: RankLayout
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
    model_parts: list[nn.Module]
    # Set under pipeline parallelism; `has_outputs` is a bool on every layout.
    pp_schedule: "PipelineSchedule | None" = None
    pp_has_first_stage: bool | None = None
    pp_has_last_stage: bool | None = None
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    offloader: Offloader
    update: Update
    checkpointer: CheckpointManager
    train_context: Callable[[], AbstractContextManager[None]]
    maybe_enable_amp: AbstractContextManager[None]
    watch: Alone = Alone()
    runner: Runner

    @property
    def dp_size(self) -> int:
        """How many groups of ranks read different batches."""
        return self.layout.dp_size

    @property
    def dp_rank(self) -> int:
        return self.layout.dp_rank

    @property
    def dp_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that read different batches of one step; None if there is only one."""
        return self.layout.dp_group if self.dp_size > 1 else None

    @property
    def loss_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks whose shares of the loss add up to that of the global batch; None if this one
        has all of it. They read different batches, or other tokens of the same rows."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        return None if mesh is None else mesh.get_group()

    @property
    def has_outputs(self) -> bool:
        """Whether outputs of the model arrive here: everywhere, but for a pipeline's other stages."""
        return self.pp_has_last_stage is not False

    @property
    def lr(self) -> float:
        """The learning rate that the schedule has for the next step."""
        return float(self.lr_schedulers.schedulers[0].get_last_lr()[0])


def build_engine(engine: Any, layout: RankLayout | None) -> None:
    """Give a `TrainingEngine` its parts. The device comes first and the checkpointer late: each
    part is made of those before it."""
    config, spec = engine.job_config, engine.train_spec
    training = config.training
    groups_before = set(c10d._world.pg_map)
    if layout is not None:
        engine.layout = layout
    engine.device = set_device() if layout is None else layout.device
    engine.parallel_dims = dims = engine.init_distributed()
    if layout is None:
        engine.layout = RankLayout(engine.device, dims, has_last_stage(config, dims))
    engine.context_sharding = ContextSharding.of(dims, config.parallelism)
    config.maybe_log()
    engine.seed = choose_seed(config, dims, engine.device)
    engine.build_data()
    engine.model_args = derive_model_args(config, spec)
    model, engine.model_converters = build_on_meta(config, spec, engine.model_args, dims)
    count = engine.model_args.get_nparams_and_flops
    engine.num_params, engine.num_flops_per_token = count(model, training.seq_len)
    engine.flops_without_attention = count(model, 0)[1]
    logger.info("model size: %s parameters", f"{engine.num_params:,}")
    use_onednn(model, engine.device)
    engine.global_batch_size = training.global_batch_size
    if engine.global_batch_size < 0:
        engine.global_batch_size = training.local_batch_size * engine.dp_size
    rows_at_once = training.local_batch_size * engine.dp_size
    engine.gradient_accumulation_steps = engine.global_batch_size // rows_at_once
    engine.loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    if dims.pp_enabled:
        (
            engine.pp_schedule,
            engine.model_parts,
            engine.pp_has_first_stage,
            engine.pp_has_last_stage,
        ) = spec.pipelining_fn(
            model,
            dims,
            config,
            engine.device,
            engine.model_args,
            spec.parallelize_fn,
            engine.loss_fn,
        )
    else:
        engine.model_parts = [spec.parallelize_fn(model, dims, config)]
    gradient_factor = average_gradients(engine)
    materialize(engine.model_parts, config, engine.device, engine.seed)

    engine.optimizers = spec.build_optimizers_fn(engine.model_parts, config.optimizer, dims)
    engine.lr_schedulers = spec.build_lr_schedulers_fn(
        engine.optimizers, config.lr_scheduler, training.steps
    )
    engine.optimizers.register_step_post_hook(
        lambda *_args, **_kwargs: engine.model_converters.post_optimizer_hook(engine.model_parts)
    )
    engine.offloader = Offloader(engine.model_parts, engine.optimizers, engine.device)
    engine.update = Update(
        config,
        engine.model_parts,
        engine.optimizers,
        engine.lr_schedulers,
        dims,
        engine.device,
        engine.dp_group,
    )
    engine.checkpointer = build_checkpointer(engine)
    engine.train_context = dist_utils.get_train_context(
        dims.tp_enabled and not config.parallelism.disable_loss_parallel
    )
    engine.maybe_enable_amp = dist_utils.maybe_enable_amp(
        dims, training.mixed_precision_param, engine.device.type
    )
    groups = set(c10d._world.pg_map) - groups_before
    engine.watch = watch_over(dims, groups, engine.device)
    weakref.finalize(engine, engine.watch.close)
    engine.runner = build_runner(engine, gradient_factor)


def job_of_hf(
    folder: str | os.PathLike[str],
    job_config: JobConfig | None,
    spec: TrainSpec | None,
    builds_data: bool,
) -> tuple[JobConfig, TrainSpec]:
    """(config, train spec) of the model in a Hugging Face folder; see `TrainingEngine.from_hf`.

    builds_data: the job reads rows of `training.seq_len` tokens.
    """
    match = from_hf_config(folder)
    job_config = JobConfig() if job_config is None else copy.deepcopy(job_config)
    flavor = os.path.basename(os.path.abspath(folder))
    job_config.model.name, job_config.model.flavor = match.family, flavor
    job_config.model.hf_assets_path = os.fspath(folder)
    spec = spec or get_train_spec(match.family)
    args, seq_len = match.model_args, job_config.training.seq_len
    if seq_len == Training.seq_len and not builds_data:
        # Nobody has set it, and rows are the caller's: a warning that it is too long would be wrong.
        args = dataclasses.replace(args, max_seq_len=max(args.max_seq_len, seq_len))
    return job_config, dataclasses.replace(spec, model_args={flavor: args})


def choose_seed(config: JobConfig, dims: ParallelDims, device: torch.device) -> int:
    """Return the seed of the parameters. The host's generators are seeded only if it asked."""
    debug = config.debug
    if debug.seed is not None:
        return set_determinism(dims, device, debug, distinct_seed_mesh_dims=["pp"])
    if debug.deterministic:
        use_deterministic_kernels(debug.deterministic_warn_only)
    seed = agree_on_seed(dims, device, debug)
    logger.info(
        "the seed is drawn: debug.seed = %d repeats this run", seed, extra=event("seed", seed=seed)
    )
    return seed


def derive_model_args(config: JobConfig, spec: TrainSpec) -> Any:
    """Return the flavor's arguments with the config's choices; the shared table stays as it is."""
    model_args = copy.deepcopy(spec.model_args[config.model.flavor])
    model_args.update_from_config(config)
    described = json.dumps(dataclasses.asdict(model_args), default=str)
    logger.debug("model %s %s: %s", config.model.name, config.model.flavor, described)
    return model_args


def build_on_meta(
    config: JobConfig, spec: TrainSpec, model_args: Any, dims: ParallelDims
) -> tuple[nn.Module, Any]:
    """(the whole model, without memory; the converters that have changed it)."""
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(model_args)
    converters = build_model_converters(config, dims)
    converters.convert(model)
    return model, converters


def materialize(
    model_parts: list[nn.Module], config: JobConfig, device: torch.device, seed: int
) -> None:
    """Allocate the parameters and fill them from the seed; the layout changes no bit."""
    init_device, buffer_device = device, None
    if config.checkpoint.create_seed_checkpoint:
        init_device = torch.device("cpu")
    elif config.training.enable_cpu_offload and device.type != "cpu":
        init_device, buffer_device = torch.device("cpu"), device
    for part in model_parts:
        part.to_empty(device=init_device)
        with torch.no_grad(), seeded_init(part, seed):
            part.init_weights(buffer_device=buffer_device)
        part.train()


def average_gradients(engine: Any) -> float:
    """Let backward divide the gradients, whatever sums them over ranks, where that is wanted.

    `training.gradient_reduction = "mean"` wants it. So does a client's own backward, on a trainer
    without data, of replicas that nothing shards: it counts on the reference's DDP, and multiplies
    its loss by the number of ranks. Returns what the losses of our own steps are multiplied by to
    make up for the latter.
    """
    dims = engine.parallel_dims
    is_mean = engine.job_config.training.gradient_reduction == "mean" and engine.dp_size > 1
    replicas_only = dims.dp_replicate_enabled and not (dims.fsdp_enabled or dims.pp_enabled)
    has_clients_backward = engine.builds_data and engine.dataloader is None
    if not (is_mean or (replicas_only and has_clients_backward)):
        return 1.0
    if engine.has_outputs:
        scale_gradients(engine.model_parts[-1], 1 / engine.dp_size)
    return 1.0 if is_mean else float(engine.dp_size)


def build_runner(engine: Any, gradient_factor: float) -> Runner:
    training, dims = engine.job_config.training, engine.parallel_dims
    if training.defer_gradient_sync and dims.pp_enabled:
        logger.warning(
            "training.defer_gradient_sync has no effect under pipeline parallelism, whose "
            "schedule reduces gradients after the last microbatch of a call anyway"
        )
    return Runner(
        engine.model_parts,
        engine.device,
        engine.model_inputs,
        engine.train_context,
        engine.maybe_enable_amp,
        sharding=engine.context_sharding,
        schedule=engine.pp_schedule,
        has_last_stage=engine.has_outputs,
        defers_reduction=training.defer_gradient_sync and not dims.pp_enabled,
        has_replicas=dims.dp_replicate_enabled,
        keeps_weights=engine.job_config.parallelism.fsdp_reshard_after_forward == "never",
        gradient_factor=gradient_factor,
        watch=engine.watch,
        dp_group=engine.dp_group,
        filler=lambda: filler_batch(training.seq_len, engine.packing.separates_documents),
    )


def build_checkpointer(engine: Any) -> CheckpointManager:
    """engine: a `TrainingEngine` that has its model parts and optimizers."""
    config, adapter_cls = engine.job_config, engine.train_spec.state_dict_adapter
    adapter = adapter_cls and adapter_cls(engine.model_args, config.model.hf_assets_path)
    checkpointer = CheckpointManager(
        dataloader=engine.dataloader,
        model_parts=engine.model_parts,
        optimizers=engine.optimizers,
        lr_schedulers=engine.lr_schedulers,
        states={"train_state": engine},
        checkpoint_config=config.checkpoint,
        sd_adapter=adapter,
        base_folder=config.job.dump_folder,
    )
    if engine.forward_only:
        del checkpointer.states[OPTIMIZER], checkpointer.states[LR_SCHEDULER]
    with_head = " with a value head" if has_value_head(config, engine.model_args) else ""
    checkpointer.model_description = f"{config.model.name} {config.model.flavor}{with_head}"
    checkpointer.tokenizer = engine.tokenizer
    dataset = getattr(engine.dataloader, "dataset", None)
    checkpointer.run_record = record_of(
        config,
        engine.global_batch_size,
        engine.tokenizer,
        getattr(dataset, "num_documents", None),
        engine.seed,
    )
    for other in host.engines():
        theirs = getattr(other, "checkpointer", None)
        if theirs is not None and checkpointer.saves_where(theirs):
            warn_once(
                logger,
                f"two engines of this process save in {checkpointer.folder} and overwrite and "
                "remove each other's steps; give each a job.dump_folder or a "
                "checkpoint.folder of its own",
            )
    return checkpointer
