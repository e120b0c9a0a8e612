"""torchtitan 0.2.x's import path of `DeepEPMoE`, which only raises: DeepEP's kernels are not available."""

from torchtitan.distributed.deepep import dispatch_tokens
from torchtitan.models.moe.moe import MoE


class DeepEPMoE(MoE):
    __init__ = dispatch_tokens
