"""Names of DeepEP's kernels, which are not available: each raises NotImplementedError when used."""

from typing import Any, NoReturn


def dispatch_tokens(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "there are no DeepEP kernels here, tokens travel to experts by torch's all-to-all; set "
        "parallelism.expert_parallel_comm_backend = 'standard', use ExpertParallel() for the "
        "experts, and build MoE(moe_args, dim, hidden_dim)"
    )


combine_tokens = sync_combine = dispatch_tokens


class DispatchState:
    __init__ = dispatch_tokens
