"""Stand-ins for functions of torchtitan 0.2.x that overlap experts with another microbatch's attention.

The overlap is not available; the schedule DualPipeV runs without it.
"""

from typing import Any

from torch import nn

from torchtitan.tools.lazy_names import not_available

DualPipeExpertParallel = HookCoordinator = overlap_callback = not_available(
    "overlap of experts with another microbatch is not available; set "
    "parallelism.pipeline_parallel_schedule = 'DualPipeV', which runs without overlap, and use "
    "ExpertParallel() for the experts"
)


class SyncHook:
    apply = overlap_callback


def get_dual_pipe_v_flag(job_config: Any, parallel_dims: Any) -> bool:
    return False


def _count_moe_modules(model: nn.Module) -> int:
    return sum(bool(getattr(module, "moe_enabled", False)) for module in model.modules())
