"""From a config and a train spec to the parts of an engine, in the order of events."""

import copy
import dataclasses
import json
import os
from typing import Any

import torch
from torch import nn

from torchtitan.batch.context import ContextSharding
from torchtitan.batch.fillers import filler_batch
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.run_record import record_of
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.determinism import (
    agree_on_seed,
    set_determinism,
    use_deterministic_kernels,
)
from torchtitan.distributed.process_group import init_distributed
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.optim.offload import Offloader
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.step.runner import Runner
from torchtitan.step.update import Update
from torchtitan.tools import host, utils
from torchtitan.tools.logging import logger, warn_once


def build_engine(engine: Any) -> None:
    """Give a `TrainingEngine` its parts. The device comes first and the checkpointer late: each
    part is made of those before it."""
    config, spec = engine.job_config, engine.train_spec
    training = config.training
    engine.device = set_device()
    engine.parallel_dims = dims = engine.init_distributed()
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
    engine.runner = build_runner(engine, gradient_factor)


def set_device() -> torch.device:
    """Return the device of this rank, made the current one."""
    device_type, device_module = utils.get_device_info()
    if device_type == "cpu":
        return torch.device("cpu")
    # Without a launcher, the device that the host program has chosen.
    index = os.environ.get("LOCAL_RANK")
    index = device_module.current_device() if index is None else int(index)
    if index >= device_module.device_count():
        raise ConfigError(
            f"LOCAL_RANK = {index} asks for device {index} of this machine, counted from 0, and "
            f"it shows {device_module.device_count()}; start as many processes on it as it has"
        )
    host.change(index, device_module.set_device, device_module.current_device)
    return torch.device(device_type, index)


def join_ranks(config: JobConfig, spec: TrainSpec, device: torch.device) -> ParallelDims:
    """Join or reuse the process group and return the layout of ranks."""
    world_size = init_distributed(
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
        always_fsdp=is_fsdp_wanted_always(config, spec, device),
    )


def is_fsdp_wanted_always(config: JobConfig, spec: TrainSpec, device: torch.device) -> bool:
    """Whether FSDP holds the parameters of a single rank, too."""
    degrees = config.parallelism
    if degrees.always_fsdp is not None:
        return degrees.always_fsdp
    if spec.build_dataloader_fn is None:
        return True
    if device.type == "cpu" or degrees.data_parallel_replicate_degree > 1:
        return False
    # Autocast would keep an fp32 residual stream, and cast all weights in every step. Others'
    # functions may leave one rank's model as it is.
    return getattr(spec.parallelize_fn, "__module__", None) == "torchtitan.models.parallelize"


def choose_seed(config: JobConfig, dims: ParallelDims, device: torch.device) -> int:
    """Return the seed of the parameters. The host's generators are seeded only if it asked."""
    debug = config.debug
    if debug.seed is not None:
        return set_determinism(dims, device, debug, distinct_seed_mesh_dims=["pp"])
    if debug.deterministic:
        use_deterministic_kernels(debug.deterministic_warn_only)
    return agree_on_seed(dims, device, debug)


def derive_model_args(config: JobConfig, spec: TrainSpec) -> Any:
    """Return the flavor's arguments with the config's choices; the shared table stays as it is."""
    model_args = copy.deepcopy(spec.model_args[config.model.flavor])
    model_args.update_from_config(config)
    described = json.dumps(dataclasses.asdict(model_args), default=str)
    logger.info("model %s %s: %s", config.model.name, config.model.flavor, described)
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
    if engine.pp_has_last_stage is not False:
        # Imports torch's FSDP, which takes a second.
        from torchtitan.distributed.fsdp import scale_gradients

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
        has_last_stage=engine.pp_has_last_stage is not False,
        defers_reduction=training.defer_gradient_sync and not dims.pp_enabled,
        has_replicas=dims.dp_replicate_enabled,
        keeps_weights=engine.job_config.parallelism.fsdp_reshard_after_forward == "never",
        gradient_factor=gradient_factor,
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
    checkpointer.model_description = f"{config.model.name} {config.model.flavor}"
    checkpointer.run_record = record_of(config, engine.global_batch_size, engine.tokenizer)
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
