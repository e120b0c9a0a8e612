"""The args of a mixture of experts, and of decoders with experts."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchtitan.config import JobConfig
from torchtitan.models.args import DecoderArgs


@dataclass
class MoEArgs:
    """The args of a mixture-of-experts layer.

    num_shared_experts: experts that see every token, stored as one wide feed-forward.
    shared_expert_dim: hidden size of this feed-forward; None: num_shared_experts * an expert's hidden size.
    shared_expert_gate: multiply the shared experts' result by sigmoid(linear map of the token, [M] -> [1]).
    score_func: turns router logits into scores.
    route_norm: divide the chosen scores by their sum; route_scale multiplies them afterwards.
    score_before_experts: multiply an expert's input by the score, not its output.
    num_expert_groups, num_limited_groups: choose only among the experts of the best groups.
    group_score: a group's score is the sum of its two highest expert scores (DeepSeek V3), or the
        highest score (DeepSeek V2's group_limited_greedy).
    use_grouped_mm: compute all experts in one kernel; otherwise one matmul per expert.
    load_balance_coeff: how much a step changes expert_bias; None: no expert_bias.
    _debug_force_load_balance: ignore the scores and send tokens to experts in turn.
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
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False


@dataclass
class MoEDecoderArgs(DecoderArgs):
    """Args of a family with mixtures of experts."""

    moe_args: MoEArgs = field(default_factory=MoEArgs)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Read debug.moe_force_load_balance, too; moe_args is copied, because flavors may share it."""
        super().update_from_config(job_config, **kwargs)
        forced = job_config.debug.moe_force_load_balance
        self.moe_args = replace(self.moe_args, _debug_force_load_balance=forced)
