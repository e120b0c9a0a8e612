"""Sizes and choices of a mixture of experts, and of decoders that have some."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.models.args import DecoderArgs
from torchtitan.models.utils import get_moe_model_nparams_and_flops


@dataclass
class MoEArgs:
    """One mixture-of-experts layer.

    num_shared_experts: experts that see every token, stored as one wide feed-forward.
    score_func: turns router logits into scores.
    route_norm: divide the chosen scores by their sum; route_scale multiplies them afterwards.
    score_before_experts: scale tokens on their way into an expert, not on their way out.
    num_expert_groups, num_limited_groups: choose only among the experts of the best groups.
    group_score: a group's score is the sum of its two best experts' (DeepSeek V3), or the best
        one's (DeepSeek V2's group_limited_greedy).
    use_grouped_mm: all experts in one kernel; otherwise one matmul after the other.
    load_balance_coeff: how far expert_bias moves in each step; None has no such bias.
    _debug_force_load_balance: ignore the scores, send tokens to experts in turn.
    """

    num_experts: int = 8
    num_shared_experts: int = 1
    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    route_norm: bool = False
    route_scale: float = 1.0
    gate_bias: bool = False
    score_before_experts: bool = True
    top_k: int = 1
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    use_grouped_mm: bool = True
    load_balance_coeff: float | None = 1e-3
    _debug_force_load_balance: bool = False


@dataclass
class MoEDecoderArgs(DecoderArgs):
    """Args of a family with mixtures of experts."""

    moe_args: MoEArgs = field(default_factory=MoEArgs)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Also take debug.moe_force_load_balance, into a copy: flavors may share one MoEArgs."""
        super().update_from_config(job_config, **kwargs)
        forced = job_config.debug.moe_force_load_balance
        self.moe_args = replace(self.moe_args, _debug_force_load_balance=forced)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return get_moe_model_nparams_and_flops(self, model, self.head_dims, seq_len)
