"""On-policy distillation: a teacher scores the tokens that the policy sampled (`[rl.teacher]`).

With p the policy and q the teacher, both at T = `rl.sampling.temperature`, the loss of the trainer is

    sum over tokens of weight * (policy_weight * loss of [rl.loss] + kl_weight * T^2 * KL)

where KL is KL(p || q) or KL(q || p) of the next token after the sampled tokens before it; the samples have no
gradient (Agarwal et al. 2024, arXiv:2306.13649, section 3.1).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchtitan.loss.distillation import DistillationLoss, Distilled
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.objective.distillation import Teacher
from torchtitan.rl.losses import LossOutput, PolicyLoss
from torchtitan.rl.types import LossInputs


@dataclass(frozen=True, eq=False)
class LossWithTeacher:
    """A policy loss, and the divergence from a teacher; takes the place of a `PolicyLoss`."""

    policy: PolicyLoss
    policy_weight: float
    teacher: Teacher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)  # such as `needs_entropy`, `guard` and `check`

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.policy.metric_names, "kl_teacher", "teacher_loss")

    def head(self, of_tokens: TokenLogProbs) -> DistillationLoss:
        return replace(self.teacher.loss, of_tokens=of_tokens)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, distilled: Distilled, batch: LossInputs
    ) -> LossOutput:
        loss, metrics = self.policy(logprobs, entropy, batch)
        found = {"kl_teacher": distilled.kl, "teacher_loss": distilled.loss.detach()}
        total = distilled.loss
        if self.policy_weight:
            total = total + self.policy_weight * loss
        return LossOutput(total, metrics | found)
