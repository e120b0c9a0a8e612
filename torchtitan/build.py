"""From a config and a train spec to the parts of an engine, in the order of events."""

import copy
import dataclasses
import json
import os
from typing import Any

import torch
from torch import nn

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.run_record import record_of
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import host, utils
from torchtitan.tools.logging import logger, warn_once


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
        return dist_utils.set_determinism(dims, device, debug, distinct_seed_mesh_dims=["pp"])
    if debug.deterministic:
        dist_utils.use_deterministic_kernels(debug.deterministic_warn_only)
    return dist_utils.agree_on_seed(dims, device, debug)


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
