"""The experts of gpt-oss: biases, and a SwiGLU of their own. Letters as in `models.moe.moe`."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe.grouped_mm import grouped_mm
from torchtitan.models.moe.moe import StackedExperts, for_each_expert, in_one_dtype


def swiglu(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * (linear + 1); x: [..., 2 H] -> [..., H].

    The gate, even columns, is cut off above `limit`, the linear part, odd ones, at +-limit.
    """
    gate = x[..., ::2].clamp(max=limit)
    linear = x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)


class GptOssGroupedExperts(StackedExperts):
    """Experts of mlp1 [E, 2 H, D], whose rows are gate and linear in turn, and mlp2 [E, D, H]."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        swiglu_limit: float,
        use_grouped_mm: bool,
    ):
        super().__init__(
            num_experts,
            use_grouped_mm,
            partial(_run_experts_for_loop, limit=swiglu_limit),
            partial(_run_experts_grouped_mm, limit=swiglu_limit),
        )
        self.mlp1_weight = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.mlp1_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.mlp2_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.mlp2_bias = nn.Parameter(torch.empty(num_experts, dim))

    def local_parameters(self) -> tuple[Tensor, ...]:
        return (
            local_parameter(self.mlp1_weight),
            local_parameter(self.mlp2_weight),
            local_parameter(self.mlp1_bias),
            # With hidden units spread over ranks, each computes one summand of the result.
            local_parameter(self.mlp2_bias, added_once=True),
        )

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


def _run_experts_for_loop(*parameters_x_and_counts: Tensor, limit: float) -> Tensor:
    """One expert after the other; called as `_run_experts_grouped_mm`."""

    def feed_forward(x: Tensor, mlp1: Tensor, mlp2: Tensor, bias1: Tensor, bias2: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, mlp1, bias1), limit=limit), mlp2, bias2)

    *parameters, x, num_tokens_per_expert = parameters_x_and_counts
    return for_each_expert(feed_forward, parameters, x, num_tokens_per_expert)


def _run_experts_grouped_mm(
    mlp1: Tensor,
    mlp2: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
    limit: float,
) -> Tensor:
    """All experts in one kernel per matrix, in the weights' dtype.

    Rows past the sum of the counts hold anything.
    """
    offsets = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    mlp1, mlp2, bias1, bias2, x_in = in_one_dtype(mlp1, mlp2, bias1, bias2, x)
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, rows, right=True)  # E for rows past the sum
    h = grouped_mm(x_in, mlp1.transpose(-2, -1), offsets) + _of_each_row(bias1, expert)
    h = swiglu(h, limit=limit)
    out = grouped_mm(h, mlp2.transpose(-2, -1), offsets) + _of_each_row(bias2, expert)
    return out.type_as(x)


def _of_each_row(bias: Tensor, expert: Tensor) -> Tensor:
    """bias: [E, C]; expert: [N] int up to E. Returns [N, C], zeros for E.

    No expert's bias gets a gradient from rows that hold anything, nan for example.
    """
    return F.pad(bias, (0, 0, 0, 1))[expert]


class GptOssMoE(MoE):
    """The shared layer around these experts."""

    def __init__(self, model_args: GptOssModelArgs, dim: int, hidden_dim: int):
        self.swiglu_limit = model_args.swiglu_limit  # first: building the experts needs it
        super().__init__(model_args.moe_args, dim, hidden_dim)

    def build_experts(self, moe_args: MoEArgs, dim: int, hidden_dim: int) -> nn.Module:
        return GptOssGroupedExperts(
            dim, hidden_dim, moe_args.num_experts, self.swiglu_limit, moe_args.use_grouped_mm
        )
