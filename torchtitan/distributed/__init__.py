"""Spreading a model over processes: meshes, sharding, pipelines, activation checkpointing."""

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.lazy_names import load_on_access

__all__ = ["NoParallel", "ParallelDims"]
# Loaded at first use, because these modules import slow libraries (torchao, DTensor, FSDP, the compiler):
# config errors are reported sooner, and a job without a feature never loads the feature's module.
_MODULE_OF = {
    "LocalFloat8Linear": ".float8_tensor_parallel",
    "float8_shards_for": ".float8_tensor_parallel",
    "NoParallel": ".tensor_parallel",
    "apply_ac": ".activation_checkpoint",
    "FSDPModule": ".fsdp",
    "apply_ddp": ".fsdp",
    "apply_fsdp": ".fsdp",
    "bytes_to_keep_gathered": ".fsdp",
    "keep_gathered": ".fsdp",
    "recover_model": ".fsdp",
    "reduce_later": ".fsdp",
    "reshard_model": ".fsdp",
    "PipelineStage": ".pipeline_stage",
    "PipelineSchedule": ".pipeline_schedule",
}
__getattr__ = load_on_access(__name__, _MODULE_OF)
