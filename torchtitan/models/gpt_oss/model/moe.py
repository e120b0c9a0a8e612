"""The experts of gpt-oss: biases, and a SwiGLU of their own. Letters as in `models.moe.moe`."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe.moe import (
    can_group,
    grouped_mm,
    in_one_dtype,
    needs_padding,
)
from torchtitan.models.moe.utils import indices_padding_wrapper


def swiglu(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * (linear + 1); x: [..., 2 H] -> [..., H].

    The gate, even columns, is cut off above `limit`, the linear part, odd ones, at +-limit.
    """
    gate = x[..., ::2].clamp(max=limit)
    linear = x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)


class GptOssGroupedExperts(nn.Module):
    """E feed-forwards, stacked: mlp1 [E, 2 H, D], its rows gate and linear in turn, mlp2 [E, D, H].

    Called as `GroupedExperts` is.
    """

    reads_local_parameters: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        swiglu_limit: float,
        use_grouped_mm: bool,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.swiglu_limit = swiglu_limit
        self.use_grouped_mm = use_grouped_mm
        self.mlp1_weight = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.mlp1_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.mlp2_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.mlp2_bias = nn.Parameter(torch.empty(num_experts, dim))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """x: [N, D], grouped by expert; num_tokens_per_expert: [E] int. Returns [N, D]."""
        mlp1, mlp2 = local_parameter(self.mlp1_weight), local_parameter(self.mlp2_weight)
        # With hidden units spread over ranks, each computes one summand of an expert's result.
        bias2 = local_parameter(self.mlp2_bias, added_once=True)
        if not (self.use_grouped_mm and can_group(mlp1, mlp2)):
            run = partial(_run_experts_for_loop, limit=self.swiglu_limit)
        else:
            run = partial(_run_experts_grouped_mm, limit=self.swiglu_limit)
            if needs_padding(self.mlp1_weight):
                run = indices_padding_wrapper(run)
        bias1 = local_parameter(self.mlp1_bias)
        return run(mlp1, mlp2, bias1, bias2, x, num_tokens_per_expert)

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


def _run_experts_for_loop(
    mlp1: Tensor,
    mlp2: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
    limit: float,
) -> Tensor:
    """One expert after the other; waits for the device to know the counts."""
    counts = num_tokens_per_expert.tolist()
    num_tokens = sum(counts)
    outs = []
    for e, group in enumerate(x[:num_tokens].split(counts)):
        h = swiglu(F.linear(group, mlp1[e], bias1[e]), limit=limit)
        outs.append(F.linear(h, mlp2[e], bias2[e]).type_as(x))
    return torch.cat([*outs, x.new_zeros(x.shape[0] - num_tokens, x.shape[-1])])


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
