"""The reference's path of a mixture of experts with DeepEP's kernels, which are not available."""

from typing import Any

from torchtitan.models.moe.moe import MoE


class DeepEPMoE(MoE):
    """Raises NotImplementedError when built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "DeepEP kernels are not available; build MoE(moe_args, dim, hidden_dim), and set "
            "parallelism.expert_parallel_comm_backend = 'standard'"
        )
