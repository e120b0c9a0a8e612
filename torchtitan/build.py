"""Builds the parts of an engine, in order, from a config, a train spec and a layout of ranks."""

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
from torchtitan.step.runner import ModelInputs, Runner
from torchtitan.step.update import Update
from torchtitan.tools import host, torch_parts, utils
from torchtitan.tools.events import event
from torchtitan.tools.files import read_text
from torchtitan.tools.logging import logger, warn_once

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import PipelineSchedule


class EngineParts:
    """The parts of an engine; each part is built from earlier parts."""

    # Set by the engine before `build`.
    job_config: JobConfig
    train_spec: TrainSpec
    device: torch.device
    layout: RankLayout
    parallel_dims: ParallelDims
    seed: int
    num_steps: int  # the last step: training.steps, or the step at which training.epochs end
    forward_only: bool
    # Set by `Trainer`; a plain engine has no data.
    builds_data = False
    tokenizer: Any = None
    dataloader: Any = None

    # Set by `build`.
    context_sharding: ContextSharding | None
    model_args: Any
    model_converters: Any
    num_params: int
    # FLOPs per token: with attention over rows of `training.seq_len` tokens, and without attention.
    num_flops_per_token: float
    flops_without_attention: float
    loss_fn: LossFunction
    has_token_loss: bool
    model_parts: list[nn.Module]
    # None without pipeline parallelism.
    pp_schedule: "PipelineSchedule | None"
    pp_has_first_stage: bool | None
    pp_has_last_stage: bool | None
    global_batch_size: int
    gradient_accumulation_steps: int
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
    engine: EngineParts,
    groups_before: Collection[dist.ProcessGroup],
    client_inputs: Callable[[TokenBatch], ModelInputs | None],
) -> None:
    """Set the parts of an engine. groups_before: process groups older than the engine. client_inputs: see `Runner`."""
    config, spec, layout = engine.job_config, engine.train_spec, engine.layout
    training, dims, device = config.training, layout.parallel_dims, layout.device
    dp_group = layout.dp_group if layout.dp_size > 1 else None
    rows_at_once = training.local_batch_size * layout.dp_size
    batch_size = training.global_batch_size
    engine.global_batch_size = rows_at_once if batch_size < 0 else batch_size
    engine.gradient_accumulation_steps = engine.global_batch_size // rows_at_once
    build_model(engine)
    parts, model_args = engine.model_parts, engine.model_args
    gradient_factor = average_gradients(engine)
    materialize(parts, config, device, engine.seed)
    engine.optimizers = spec.build_optimizers_fn(parts, config.optimizer, dims)
    engine.lr_schedulers = spec.build_lr_schedulers_fn(
        engine.optimizers, config.lr_scheduler, engine.num_steps
    )
    converters = engine.model_converters
    engine.optimizers.register_step_post_hook(
        lambda *_args, **_kwargs: converters.post_optimizer_hook(parts)
    )
    engine.offloader = Offloader(parts, engine.optimizers, device)
    engine.checkpointer = checkpointer = build_checkpointer(engine)
    describe_run(engine)
    engine.update = Update(
        config,
        parts,
        engine.optimizers,
        engine.lr_schedulers,
        dims,
        device,
        dp_group,
        before_update=lambda: checkpointer.maybe_wait_for_staging(),
    )
    loss_parallel = dims.tp_enabled and not config.parallelism.disable_loss_parallel
    engine.train_context = dist_utils.get_train_context(loss_parallel)
    engine.maybe_enable_amp = dist_utils.maybe_enable_amp(
        dims, training.mixed_precision_param, device.type
    )
    engine.watch = watch_over(dims, set(torch_parts.world.pg_map) - set(groups_before), device)
    policy = DocumentPolicy.from_job(training, model_args, engine.tokenizer)
    log_policies(training, dims, policy)
    engine.runner = Runner(
        parts,
        device,
        engine.train_context,
        engine.maybe_enable_amp,
        sharding=engine.context_sharding,
        schedule=engine.pp_schedule,
        has_value_head=has_value_head(config, model_args),
        defers_reduction=training.defer_gradient_sync and not dims.pp_enabled,
        has_replicas=dims.dp_replicate_enabled,
        keeps_weights=config.parallelism.fsdp_reshard_after_forward == "never",
        gradient_factor=gradient_factor,
        watch=engine.watch,
        dp_group=dp_group,
        dummy=lambda: dummy_batch(training.seq_len, policy.separates_documents),
        client_inputs=client_inputs,
    )


def build_model(engine: EngineParts) -> None:
    """Build the model on the meta device, convert it, split it into stages and parallelize it."""
    config, spec, layout = engine.job_config, engine.train_spec, engine.layout
    dims, seq_len = layout.parallel_dims, config.training.seq_len
    engine.context_sharding = ContextSharding.from_parallelism(dims, config.parallelism)
    engine.model_args = args = derive_model_args(config, spec)
    model, engine.model_converters = build_on_meta(config, spec, args, dims)
    count = args.get_nparams_and_flops
    engine.num_params, engine.num_flops_per_token = count(model, seq_len)
    engine.flops_without_attention = count(model, 0)[1]
    logger.info("model size: %s parameters", f"{engine.num_params:,}")
    if not (dims.pp_enabled and splits_backward(config.parallelism)):
        # oneDNN computes gradients of inputs and weights at once; schedules that split backward cannot use it.
        use_onednn(model, layout.device)
    engine.loss_fn = loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    engine.has_token_loss = bool(spec.fact("has_token_loss"))
    engine.pp_schedule = engine.pp_has_first_stage = engine.pp_has_last_stage = None
    if not dims.pp_enabled:
        engine.model_parts = [spec.parallelize_fn(model, dims, config)]
        return
    (
        engine.pp_schedule,
        engine.model_parts,
        engine.pp_has_first_stage,
        engine.pp_has_last_stage,
    ) = spec.pipelining_fn(model, dims, config, layout.device, args, spec.parallelize_fn, loss_fn)


def build_checkpointer(engine: EngineParts) -> CheckpointManager:
    config, make_adapter = engine.job_config, engine.train_spec.state_dict_adapter
    checkpointer = CheckpointManager(
        dataloader=engine.dataloader,
        model_parts=engine.model_parts,
        optimizers=engine.optimizers,
        lr_schedulers=engine.lr_schedulers,
        states={"train_state": engine},
        checkpoint_config=config.checkpoint,
        sd_adapter=make_adapter and make_adapter(engine.model_args, config.model.hf_assets_path),
        base_folder=config.job.dump_folder,
        lora=config.lora if "lora" in config.model.converters else None,
    )
    if engine.forward_only:
        del checkpointer.states[OPTIMIZER], checkpointer.states[LR_SCHEDULER]
    return checkpointer


def describe_run(engine: EngineParts) -> None:
    """Set what checkpoints contain besides states: model name, tokenizer, chat template, run record."""
    config, checkpointer = engine.job_config, engine.checkpointer
    template = config.training.chat_template
    with_head = " with a value head" if has_value_head(config, engine.model_args) else ""
    checkpointer.model_description = f"{config.model.name} {config.model.flavor}{with_head}"
    checkpointer.tokenizer = engine.tokenizer
    if template and os.path.isfile(template):
        checkpointer.chat_template = read_text(template)
    # None: all args may differ from the loaded folder's config.json, because model.hf_config is set.
    chosen_args = names_of_choices(config.model.args) if config.model.hf_config is None else None
    checkpointer.chosen_args = chosen_args
    dataset = getattr(engine.dataloader, "dataset", None)
    checkpointer.run_record = record_of(
        config,
        engine.global_batch_size,
        engine.tokenizer,
        getattr(dataset, "num_documents", None),
        engine.seed,
        engine.model_args,
        dataset.sources if isinstance(dataset, PackedDataset) else (),
    )
    warn_of_shared_folder(checkpointer)


def log_policies(training: Training, dims: ParallelDims, policy: DocumentPolicy) -> None:
    """Log how documents are separated, and warn if the layout makes defer_gradient_sync useless."""
    if training.defer_gradient_sync and dims.pp_enabled:
        logger.warning(
            "training.defer_gradient_sync has no effect under pipeline parallelism, whose "
            "schedule reduces gradients after the last microbatch of a call anyway"
        )
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


def average_gradients(engine: EngineParts) -> float:
    """Make backward average gradients over ranks if needed; return a factor for the engine's losses.

    Averaging is needed for gradient_reduction = "mean", and under DDP for a trainer without a dataloader.
    There, a client written for torchtitan 0.2.x runs its own backward, expects DDP to average gradients,
    and multiplies its loss by the number of ranks. The factor does the same to the engine's losses.
    """
    dims, dp_size = engine.layout.parallel_dims, engine.layout.dp_size
    is_mean = engine.job_config.training.gradient_reduction == "mean" and dp_size > 1
    replicas_only = dims.dp_replicate_enabled and not (dims.fsdp_enabled or dims.pp_enabled)
    has_clients_backward = engine.builds_data and engine.dataloader is None
    if not (is_mean or (replicas_only and has_clients_backward)):
        return 1.0
    if engine.pp_has_last_stage is not False:
        scale_gradients(engine.model_parts[-1], 1 / dp_size)
    return 1.0 if is_mean else float(dp_size)


def warn_of_shared_folder(checkpointer: CheckpointManager) -> None:
    """Warn if another engine of this process saves to the same folder."""
    for engine in host.engines():
        other = getattr(engine, "checkpointer", None)
        if other in (None, checkpointer):
            continue
        both_save = all(each.enable and not each.load_only for each in (checkpointer, other))
        folders = {os.path.realpath(each.folder) for each in (checkpointer, other)}
        is_same_bucket = checkpointer.bucket and checkpointer.bucket == other.bucket
        if both_save and (len(folders) == 1 or is_same_bucket):
            warn_once(
                logger,
                f"two engines of this process save in {checkpointer.bucket or checkpointer.folder} and overwrite and "
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

    builds_data: True if the job reads rows of `training.seq_len` tokens.
    """
    match = from_hf_config(folder)
    job_config = JobConfig() if job_config is None else copy.deepcopy(job_config)
    flavor = os.path.basename(os.path.abspath(folder))
    job_config.model.name, job_config.model.flavor = match.family, flavor
    job_config.model.hf_assets_path = os.fspath(folder)
    if builds_data and job_config.loss.name:  # DPO's reference model needs the initial weights
        job_config.checkpoint.initial_load_in_hf = True
    spec = spec or get_train_spec(match.family)
    args, seq_len = match.model_args, job_config.training.seq_len
    if seq_len == Training.seq_len and not builds_data:
        # The caller chooses the row length, so the default seq_len must not cause a warning.
        args = dataclasses.replace(args, max_seq_len=max(args.max_seq_len, seq_len))
    return job_config, dataclasses.replace(spec, model_args={flavor: args})


def choose_seed(config: JobConfig, dims: ParallelDims, device: torch.device) -> int:
    """Return the seed for parameters. Seeds the host's generators only if `debug.seed` is set."""
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
    """Return a copy of the flavor's args, updated from the config."""
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
    if spec.fact("optimizer_names") is not None:  # a client may build its own optimizers
        check_groups(model, config.optimizer)
    return model, converters


def materialize(
    model_parts: list[nn.Module], config: JobConfig, device: torch.device, seed: int
) -> None:
    """Allocate and initialise the parameters; values depend on the seed, not on the layout."""
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
