"""Overlapping one microbatch's experts with another microbatch's attention: not available.

The schedule DualPipeV runs, but without that overlap. The names exist so that programs written
against the reference can import them; those that stand for the overlap raise when used.
"""

from typing import Any, NoReturn

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.distributed.parallel_dims import ParallelDims


def get_dual_pipe_v_flag(job_config: JobConfig, parallel_dims: ParallelDims) -> bool:
    """Return False: experts and attention of two microbatches never overlap."""
    return False


def overlap_callback(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "experts do not overlap with another microbatch here; set "
        "parallelism.pipeline_parallel_schedule = 'DualPipeV', which runs without this, and use "
        "ExpertParallel() for the experts"
    )


class DualPipeExpertParallel(ExpertParallel):
    __init__ = overlap_callback


class HookCoordinator:
    __init__ = overlap_callback


class SyncHook:
    apply = staticmethod(overlap_callback)


def _count_moe_modules(model: nn.Module) -> int:
    """Return how many blocks of the model have experts."""
    return sum(bool(getattr(module, "moe_enabled", False)) for module in model.modules())
