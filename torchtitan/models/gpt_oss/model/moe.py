"""The experts of gpt-oss, with biases and their own SwiGLU. Letters as in `models.moe.moe`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.moe import MoE
from torchtitan.models.moe.moe import StackedExperts


def swiglu(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * (linear + 1); x: [..., 2 H] -> [..., H].

    The gate (even columns) is cut off above `limit`, the linear part (odd columns) at +-limit.
    """
    gate = x[..., ::2].clamp(max=limit)
    linear = x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)


def feed_forward(
    linear: Callable[..., Tensor],
    x: Tensor,
    mlp1: Tensor,
    mlp2: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    limit: float,
) -> Tensor:
    """The experts' two layers; see `run_for_loop`."""
    return linear(swiglu(linear(x, mlp1, bias1), limit=limit), mlp2, bias2)


class GptOssGroupedExperts(StackedExperts):
    """Experts of mlp1 [E, 2 H, D], whose rows alternate gate and linear part, and mlp2 [E, D, H]."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        swiglu_limit: float,
        use_grouped_mm: bool,
    ):
        super().__init__(num_experts, use_grouped_mm, partial(feed_forward, limit=swiglu_limit))
        self.mlp1_weight = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.mlp1_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.mlp2_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.mlp2_bias = nn.Parameter(torch.empty(num_experts, dim))

    def local_parameters(self) -> tuple[Tensor, ...]:
        return (
            local_parameter(self.mlp1_weight),
            local_parameter(self.mlp2_weight),
            local_parameter(self.mlp1_bias),
            # If hidden units are split over ranks, their results are summed, so one rank adds it.
            local_parameter(self.mlp2_bias, added_once=True),
        )

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


class GptOssMoE(MoE):
    """The mixture of experts of `models.moe.moe` with gpt-oss' experts."""

    def __init__(self, model_args: GptOssModelArgs, dim: int, hidden_dim: int):
        args = model_args.moe_args
        experts = GptOssGroupedExperts(
            dim, hidden_dim, args.num_experts, model_args.swiglu_limit, args.use_grouped_mm
        )
        super().__init__(args, dim, hidden_dim, experts)
