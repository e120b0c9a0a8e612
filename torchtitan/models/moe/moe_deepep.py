"""The mixture of experts on DeepEP's kernels: not available; see `torchtitan.distributed.deepep`."""

from typing import Any

from torchtitan.models.moe.moe import MoE


class DeepEPMoE(MoE):
    """Raises NotImplementedError when built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "there are no DeepEP kernels here; build MoE(moe_args, dim, hidden_dim), and set "
            "parallelism.expert_parallel_comm_backend = 'standard'"
        )
