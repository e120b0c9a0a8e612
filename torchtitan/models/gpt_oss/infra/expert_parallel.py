"""How gpt-oss' experts are split by hidden units; its parameters have names of their own."""

from torchtitan.distributed.expert_parallel import ExpertTensorParallel, TensorParallel
from torchtitan.models.parallelize import TENSOR_PARALLEL_PLAN

__all__ = ["GptossExpertTensorParallel", "GptossTensorParallel"]

_HIDDEN_DIMS = TENSOR_PARALLEL_PLAN["layers.*.moe.experts"]


class GptossTensorParallel(TensorParallel):
    """Splits experts by hidden units over a 1-D mesh."""

    def __init__(self) -> None:
        super().__init__(_HIDDEN_DIMS)


class GptossExpertTensorParallel(ExpertTensorParallel):
    """Deals experts to ranks and splits each by hidden units, over a mesh [ep, etp]."""

    def __init__(self) -> None:
        super().__init__(_HIDDEN_DIMS)
