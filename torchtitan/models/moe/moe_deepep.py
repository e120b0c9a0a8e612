"""torchtitan 0.2.x's path of experts with DeepEP's kernels, which are not available."""

from torchtitan.distributed.deepep import dispatch_tokens
from torchtitan.models.moe.moe import MoE


class DeepEPMoE(MoE):
    __init__ = dispatch_tokens
