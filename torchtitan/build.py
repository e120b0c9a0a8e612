"""Builds the parts of an engine from a config, a train spec and a layout, in the order of events."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.adapters.lora import init_adapters
from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.dummy_microbatches import dummy_batch
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.run_record import record_of
from torchtitan.checkpoint.states import LR_SCHEDULER, OPTIMIZER
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks.common import has_value_head
from torchtitan.config.job_config import Training
from torchtitan.config.pipeline_layout import splits_backward
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.determinism import (
    agree_on_seed,
    set_determinism,
    use_deterministic_kernels,
)
from torchtitan.distributed.fsdp import scale_gradients
from torchtitan.distributed.processes.failure_watch import Watch, watch_over
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.loss.cross_entropy import LossFunction
from torchtitan.models.hf_config import from_hf_config, names_of_choices
from torchtitan.numerics.products import use_onednn
from torchtitan.optim.groups import check_groups
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.offload import Offloader
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.rank_layout import RankLayout
from torchtitan.step.runner import ModelInputs, Runner, on_error
from torchtitan.step.update import Update
from torchtitan.tools import host, torch_parts, utils
from torchtitan.tools.events import event
from torchtitan.tools.files import read_text
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """The parts of an engine, in the order in which `build` makes them."""

    context_sharding: ContextSharding | None
    model_args: Any
    model_converters: Any
    num_params: int
    num_flops_per_token: float  # for rows of `training.seq_len` tokens
    flops_without_attention: float  # for the same rows
    global_batch_size: int
    gradient_accumulation_steps: int
    loss_fn: LossFunction
    has_token_loss: bool
    model_parts: list[nn.Module]
    # None without pipeline parallelism.
    pp_schedule: "PipelineSchedule | None"
    pp_has_first_stage: bool | None
    pp_has_last_stage: bool | None
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    offloader: Offloader
    checkpointer: CheckpointManager
    update: Update
    train_context: Callable[[], AbstractContextManager[None]]
    maybe_enable_amp: AbstractContextManager[None]
    watch: Watch
    runner: Runner


def build(
    config: JobConfig,
    spec: TrainSpec,
    layout: RankLayout,
    *,
    seed: int,
    tokenizer: Any,
    dataloader: Any,
    train_state: Stateful,
    client_inputs: Callable[[TokenBatch], ModelInputs | None],
    num_steps: int,
    forward_only: bool,
    has_clients_backward: bool,
    groups_before: Collection[dist.ProcessGroup],
) -> EngineParts:
    """Build the model and everything around it; each part is made of the parts before it.

    seed: fills the parameters. tokenizer, dataloader: saved in checkpoints; None without data.
    train_state: the counters of a checkpoint. client_inputs: see `Runner`.
    num_steps: of the learning rate's schedule.
    has_clients_backward: a client may call backward itself. True for a `Trainer` without a dataloader:
        it is driven by a client of torchtitan 0.2.x, which counts on that version's DDP.
    groups_before: process groups that are not the engine's.
    """
    training, dims, device = config.training, layout.parallel_dims, layout.device
    dp_size = layout.dp_size
    dp_group = layout.dp_group if dp_size > 1 else None
    context_sharding = ContextSharding.from_parallelism(dims, config.parallelism)
    model_args = derive_model_args(config, spec)
    model, converters = build_on_meta(config, spec, model_args, dims)
    count = model_args.get_nparams_and_flops
    num_params, num_flops_per_token = count(model, training.seq_len)
    flops_without_attention = count(model, 0)[1]
    logger.info("model size: %s parameters", f"{num_params:,}")
    if not (dims.pp_enabled and splits_backward(config.parallelism)):
        # Its backward computes both gradients at once, and such a pipeline asks for one at a time.
        use_onednn(model, device)
    global_batch_size = training.global_batch_size
    rows_at_once = training.local_batch_size * dp_size
    if global_batch_size < 0:
        global_batch_size = rows_at_once
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    schedule = has_first_stage = has_last_stage = None
    if dims.pp_enabled:
        schedule, model_parts, has_first_stage, has_last_stage = spec.pipelining_fn(
            model, dims, config, device, model_args, spec.parallelize_fn, loss_fn
        )
    else:
        model_parts = [spec.parallelize_fn(model, dims, config)]
    has_outputs = has_last_stage is not False
    last_part = model_parts[-1] if has_outputs else None
    gradient_factor = average_gradients(config, layout, last_part, has_clients_backward)
    materialize(model_parts, config, device, seed)

    optimizers = spec.build_optimizers_fn(model_parts, config.optimizer, dims)
    lr_schedulers = spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, num_steps)
    optimizers.register_step_post_hook(
        lambda *_args, **_kwargs: converters.post_optimizer_hook(model_parts)
    )
    offloader = Offloader(model_parts, optimizers, device)
    checkpointer = CheckpointManager(
        dataloader=dataloader,
        model_parts=model_parts,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        states={"train_state": train_state},
        checkpoint_config=config.checkpoint,
        sd_adapter=spec.state_dict_adapter
        and spec.state_dict_adapter(model_args, config.model.hf_assets_path),
        base_folder=config.job.dump_folder,
        lora=config.lora if "lora" in config.model.converters else None,
    )
    value_head = has_value_head(config, model_args)
    with on_error(checkpointer.close):
        if forward_only:
            del checkpointer.states[OPTIMIZER], checkpointer.states[LR_SCHEDULER]
        with_head = " with a value head" if value_head else ""
        checkpointer.model_description = f"{config.model.name} {config.model.flavor}{with_head}"
        checkpointer.tokenizer = tokenizer
        if training.chat_template and os.path.isfile(training.chat_template):
            checkpointer.chat_template = read_text(training.chat_template)
        if config.model.hf_config is None:  # otherwise all args are the user's choice
            checkpointer.chosen_args = names_of_choices(config.model.args)
        else:
            checkpointer.chosen_args = None
        dataset = getattr(dataloader, "dataset", None)
        checkpointer.run_record = record_of(
            config,
            global_batch_size,
            tokenizer,
            getattr(dataset, "num_documents", None),
            seed,
            model_args,
            dataset.sources if isinstance(dataset, PackedDataset) else (),
        )
        warn_of_shared_folder(checkpointer)
        update = Update(
            config,
            model_parts,
            optimizers,
            lr_schedulers,
            dims,
            device,
            dp_group,
            before_update=lambda: checkpointer.maybe_wait_for_staging(),
        )
        train_context = dist_utils.get_train_context(
            dims.tp_enabled and not config.parallelism.disable_loss_parallel
        )
        amp = dist_utils.maybe_enable_amp(dims, training.mixed_precision_param, device.type)
        own_groups = set(torch_parts.world.pg_map) - set(groups_before)
        watch = watch_over(dims, own_groups, device)
    if training.defer_gradient_sync and dims.pp_enabled:
        logger.warning(
            "training.defer_gradient_sync has no effect under pipeline parallelism, whose "
            "schedule reduces gradients after the last microbatch of a call anyway"
        )
    policy = DocumentPolicy.from_job(training, model_args, tokenizer)
    if policy.separates_documents:
        logger.info(
            "model.attn_mask_type = '%s' keeps documents apart: with training.mask_boundary_loss = %s "
            "labels of the next document are %s the loss and its denominator; with "
            "training.restart_positions = %s RoPE positions count from the start of %s",
            policy.attn_mask_type,
            str(policy.mask_boundary_loss).lower(),
            "left out of" if policy.mask_boundary_loss else "in",
            str(policy.restart_positions).lower(),
            "each document" if policy.restart_positions else "the row",
        )
    runner = Runner(
        model_parts,
        device,
        train_context,
        amp,
        sharding=context_sharding,
        schedule=schedule,
        has_outputs=has_outputs,
        has_value_head=value_head,
        defers_reduction=training.defer_gradient_sync and not dims.pp_enabled,
        has_replicas=dims.dp_replicate_enabled,
        keeps_weights=config.parallelism.fsdp_reshard_after_forward == "never",
        gradient_factor=gradient_factor,
        watch=watch,
        dp_group=dp_group,
        dummy=lambda: dummy_batch(training.seq_len, policy.separates_documents),
        client_inputs=client_inputs,
    )
    return EngineParts(
        context_sharding=context_sharding,
        model_args=model_args,
        model_converters=converters,
        num_params=num_params,
        num_flops_per_token=num_flops_per_token,
        flops_without_attention=flops_without_attention,
        global_batch_size=global_batch_size,
        gradient_accumulation_steps=global_batch_size // rows_at_once,
        loss_fn=loss_fn,
        has_token_loss=bool(spec.fact("has_token_loss")),
        model_parts=model_parts,
        pp_schedule=schedule,
        pp_has_first_stage=has_first_stage,
        pp_has_last_stage=has_last_stage,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        offloader=offloader,
        checkpointer=checkpointer,
        update=update,
        train_context=train_context,
        maybe_enable_amp=amp,
        watch=watch,
        runner=runner,
    )


def average_gradients(
    config: JobConfig, layout: RankLayout, last_part: nn.Module | None, has_clients_backward: bool
) -> float:
    """Let backward average the gradients over ranks, if the job or a client's own backward wants it.

    last_part: the part with the model's outputs; None on ranks without it.
    On replicas that nothing shards, a client's own backward counts on the reference's DDP, which
    averages, and multiplies its loss by the number of ranks. Returns the factor of the engine's own
    losses that makes up for that.
    """
    dims, dp_size = layout.parallel_dims, layout.dp_size
    is_mean = config.training.gradient_reduction == "mean" and dp_size > 1
    replicas_only = dims.dp_replicate_enabled and not (dims.fsdp_enabled or dims.pp_enabled)
    if not (is_mean or (replicas_only and has_clients_backward)):
        return 1.0
    if last_part is not None:
        scale_gradients(last_part, 1 / dp_size)
    return 1.0 if is_mean else float(dp_size)


def warn_of_shared_folder(checkpointer: CheckpointManager) -> None:
    """Warn if another engine of this process saves in the same folder."""
    for engine in host.engines():
        other = getattr(engine, "checkpointer", None)
        if other in (None, checkpointer):
            continue
        both_save = all(each.enable and not each.load_only for each in (checkpointer, other))
        if both_save and os.path.realpath(checkpointer.folder) == os.path.realpath(other.folder):
            warn_once(
                logger,
                f"two engines of this process save in {checkpointer.folder} and overwrite and "
                "remove each other's steps; give each a job.dump_folder or a "
                "checkpoint.folder of its own",
            )


def job_of_hf(
    folder: str | os.PathLike[str],
    job_config: JobConfig | None,
    spec: TrainSpec | None,
    builds_data: bool,
) -> tuple[JobConfig, TrainSpec]:
    """Return (config, train spec) of the model in a Hugging Face folder; see `TrainingEngine.from_hf`.

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
        # The default, and the caller makes the rows: a warning that it is too long would be wrong.
        args = dataclasses.replace(args, max_seq_len=max(args.max_seq_len, seq_len))
    return job_config, dataclasses.replace(spec, model_args={flavor: args})


def choose_seed(config: JobConfig, dims: ParallelDims, device: torch.device) -> int:
    """Return the seed of the parameters. The host's generators are seeded only if `debug.seed` is set."""
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
    """Return the model on the meta device after conversion, and its converters."""
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(model_args)
    converters = build_model_converters(config, dims)
    converters.convert(model)
    if spec.fact("optimizer_names") is not None:  # otherwise a client's optimizers
        check_groups(model, config.optimizer)
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
            init_adapters(part)
        part.train()
