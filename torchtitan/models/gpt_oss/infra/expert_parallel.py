"""The reference's names for splitting gpt-oss' experts by hidden units."""

from functools import partial

from torchtitan.distributed.expert_parallel import ExpertTensorParallel, TensorParallel
from torchtitan.models.tp_plan import TENSOR_PARALLEL_PLAN

_HIDDEN_DIMS = TENSOR_PARALLEL_PLAN["layers.*.moe.experts"]

GptossTensorParallel = partial(TensorParallel, _HIDDEN_DIMS)
GptossExpertTensorParallel = partial(ExpertTensorParallel, _HIDDEN_DIMS)
