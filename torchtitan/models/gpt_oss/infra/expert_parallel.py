"""How gpt-oss' experts, whose parameters have other names, are split by hidden units."""

from functools import partial

from torchtitan.distributed.expert_parallel import ExpertTensorParallel, TensorParallel
from torchtitan.models.tp_plan import TENSOR_PARALLEL_PLAN

_HIDDEN_DIMS = TENSOR_PARALLEL_PLAN["layers.*.moe.experts"]

GptossTensorParallel = partial(TensorParallel, _HIDDEN_DIMS)
GptossExpertTensorParallel = partial(ExpertTensorParallel, _HIDDEN_DIMS)
