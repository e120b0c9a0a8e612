"""Pipeline parallelism: a decoder cut into stages, each with a part of its layers.

A train spec names `pipeline_llm` as its `pipelining_fn`. Every train spec imports this module, so
`distributed` loads the slow modules only at first use.
"""

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan import distributed
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks import layout
from torchtitan.config.checks.common import refuse
from torchtitan.config.pipeline_layout import (
    generate_llm_fqn_per_model_part,
    modules_of_stages,
    stage_ids_of_rank,
)
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.tied_copies import mark_copy
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.distributed.pipeline_schedule import LossFunction, PipelineSchedule
    from torchtitan.distributed.pipeline_stage import PipelineStage

__all__ = [
    "build_pipeline_schedule",
    "generate_llm_fqn_per_model_part",
    "pipeline_llm",
    "pipeline_module_split",
]


def pipeline_llm(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: "LossFunction",
) -> "tuple[PipelineSchedule, list[nn.Module], bool, bool]":
    """Return (schedule, this rank's parts, holds first stage?, holds last stage?) of a decoder.

    Each part is a parallelized copy of the model, without the modules of the other parts.
    """
    parallelism = job_config.parallelism
    *module_names, last = modules_of_stages(parallelism, model_args.n_layers)
    if getattr(model_args, "value_head", False):
        last = [*last[:-1], "score"]  # a model with a value head has `score` instead of `output`
    stages, parts = pipeline_module_split(
        model,
        parallel_dims.get_mesh("pp"),
        parallelism.pipeline_parallel_schedule,
        device,
        [*module_names, last],
    )
    for i, (stage, part) in enumerate(zip(stages, parts, strict=True)):
        parts[i] = stage.submod = parallelize_fn(part, parallel_dims, job_config)
    # Stages send hidden states in mixed_precision_param under FSDP, which casts parameters and inputs, and in
    # training.dtype without FSDP, because autocast is off under a pipeline. This replaces the dtype that
    # pipeline_module_split read from the parameters before FSDP.
    training, uses_fsdp = job_config.training, isinstance(parts[0], distributed.FSDPModule)
    dtype = training.mixed_precision_param if uses_fsdp else training.dtype
    for stage in stages:
        stage.hidden_states = model_args.dim, TORCH_DTYPE_MAP[dtype]

    schedule = build_pipeline_schedule(job_config, stages, loss_fn)
    if parallel_dims.dp_replicate_enabled and not uses_fsdp:
        schedule.replicas = parallel_dims.get_mesh("dp_replicate")
    return schedule, parts, schedule.has_first_stage, schedule.has_last_stage


pipeline_llm.cuts_by_layers = True  # see `TrainSpec.cuts_by_layers`


def pipeline_module_split(
    whole_model: nn.Module,
    pp_mesh: DeviceMesh,
    pp_schedule: str,
    device: torch.device,
    module_names_per_stage: list[list[str]],
) -> "tuple[list[PipelineStage], list[nn.Module]]":
    """Return this rank's stages and their modules: copies of the model, without the other stages.

    module_names_per_stage: names of the model's children, or `<child>.<key>` for an entry of a
        ModuleList or ModuleDict. Entries of a ModuleDict keep their keys. Other children become None.
    Raises ValueError if the schedule cannot place the stages on the ranks.
    """
    num_stages = len(module_names_per_stage)
    ids = stage_ids_of_rank(pp_schedule, pp_mesh.get_local_rank(), pp_mesh.size(), num_stages)
    dim = getattr(getattr(whole_model, "model_args", None), "dim", None)
    dtype = next((p.dtype for p in whole_model.parameters()), torch.get_default_dtype())
    stages, models = [], []
    for stage_id in ids:
        model, kept = copy.deepcopy(whole_model), set(module_names_per_stage[stage_id])
        for name, child in list(model.named_children()):
            if isinstance(child, nn.ModuleDict):
                for key in list(child):
                    if f"{name}.{key}" not in kept:
                        del child[key]
            elif isinstance(child, nn.ModuleList):
                entries = [entry for i, entry in enumerate(child) if f"{name}.{i}" in kept]
                setattr(model, name, nn.ModuleList(entries))
            elif name not in kept:
                setattr(model, name, None)
        mark_copy(model, whole_model)
        stage = distributed.PipelineStage(
            model,
            stage_id,
            num_stages,
            device,
            group=pp_mesh.get_group("pp"),
            # For clients that call this function themselves; `pipeline_llm` replaces the dtype.
            hidden_states=None if dim is None else (dim, dtype),
        )
        stages.append(stage)
        models.append(model)
        names = ", ".join(module_names_per_stage[stage_id])
        logger.info("pipeline stage %d of %d holds %s", stage_id, num_stages, names)
    return stages, models


def build_pipeline_schedule(
    job_config: JobConfig, stages: "list[PipelineStage]", loss_fn: "LossFunction"
) -> "PipelineSchedule":
    """Return the schedule that the config names, for this rank's stages.

    Raises FileNotFoundError if the schedule's CSV file is missing, and ConfigError (a ValueError)
    for an unknown schedule or a local batch that does not divide into microbatches.
    """
    parallelism, rows = job_config.parallelism, job_config.training.local_batch_size
    csv_path = parallelism.pipeline_parallel_schedule_csv or ""
    if csv_path and not os.path.isfile(csv_path):
        raise FileNotFoundError(
            f"parallelism.pipeline_parallel_schedule_csv must be a file, got {csv_path!r}"
        )
    refuse(layout.pipeline_schedule(job_config))
    microbatch_size = parallelism.pipeline_parallel_microbatch_size
    n_microbatches, num_stages = rows // microbatch_size, stages[0].num_stages
    if n_microbatches < num_stages:
        logger.warning(
            f"{n_microbatches} pipeline microbatches for {num_stages} stages leave ranks idle: raise "
            f"training.local_batch_size = {rows}, or lower "
            f"parallelism.pipeline_parallel_microbatch_size = {microbatch_size}"
        )
    return distributed.PipelineSchedule(
        parallelism.pipeline_parallel_schedule, stages, loss_fn, n_microbatches, csv_path
    )
