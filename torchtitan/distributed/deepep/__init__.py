"""DeepEP's kernels for experts on several ranks: not available.

The names exist so that programs written against the reference can import them; each raises
NotImplementedError when used. `expert_parallel.ExpertParallel` deals experts to ranks.
"""

from typing import Any, NoReturn


def dispatch_tokens(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "there are no DeepEP kernels here; set parallelism.expert_parallel_comm_backend = "
        "'standard', whose ExpertParallel dispatches and combines by torch's all-to-all"
    )


combine_tokens = sync_combine = dispatch_tokens


class DispatchState:
    __init__ = dispatch_tokens
