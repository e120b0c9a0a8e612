"""On-policy distillation: a teacher scores the tokens that the policy sampled (`[rl.teacher]`).

With p the policy and q the teacher, both at `rl.sampling.temperature`, the loss of the trainer is

    sum over tokens of weight * (policy_weight * loss of [rl.loss] + kl_weight * T^2 * KL)

where KL compares the next-token distributions after the sampled tokens before it: KL(p || q), or KL(q || p)
(Agarwal et al. 2024, arXiv:2306.13649, section 3.1, whose samples have no gradient either).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.engine import TrainingEngine
from torchtitan.loss.distillation import DistillationLoss, Distilled
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.objective.distillation import Teacher
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import LossOutput, PolicyLoss
from torchtitan.rl.types import LossInputs


class ScoredTokens(NamedTuple):
    """The fields of `TokenOutputs`, and the divergence of the microbatch's tokens."""

    logprobs: Tensor
    entropy: Tensor | None
    distilled: Distilled


@dataclass(frozen=True, eq=False)
class _Head:
    logprobs: TokenLogProbs
    distillation: DistillationLoss

    def with_batch(self, batch: Mapping[str, Any]) -> "_Head":
        return replace(self, distillation=self.distillation.with_batch(batch))

    def __call__(self, *operands: Any, **options: Any) -> ScoredTokens:
        """The arguments and errors are those of `TokenLogProbs`."""
        of_tokens = self.logprobs(*operands, **options)
        return ScoredTokens(*of_tokens, self.distillation(*operands, **options))


class LossWithTeacher:
    """A policy loss, and the divergence from a teacher; takes the place of a `PolicyLoss`."""

    def __init__(self, loss: PolicyLoss, policy_weight: float, distillation: DistillationLoss):
        self.loss, self.policy_weight, self._distillation = loss, policy_weight, distillation
        self.guard, self.needs_entropy = loss.guard, loss.needs_entropy
        self.needs_whole_sequences, self.check = loss.needs_whole_sequences, loss.check
        self.metric_names = (*loss.metric_names, "kl_teacher", "teacher_loss")

    def head(self, logprobs: TokenLogProbs) -> _Head:
        options = {"compile_backend": logprobs.compile_backend}
        return _Head(logprobs, replace(self._distillation, **options))

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, distilled: Distilled, batch: LossInputs
    ) -> LossOutput:
        loss, metrics = self.loss(logprobs, entropy, batch)
        found = {"kl_teacher": distilled.kl, "teacher_loss": distilled.loss.detach()}
        total = distilled.loss
        if self.policy_weight:
            total = total + self.policy_weight * loss
        return LossOutput(total, metrics | found)


def build_teacher(
    job_config: JobConfig, policy: TrainingEngine, tokenizer: Any, loss: PolicyLoss
) -> tuple[Teacher, LossWithTeacher]:
    """Return the teacher of `[rl.teacher]`, and the loss that reads its scores. Collective."""
    settings, temperature = job_config.rl.teacher, job_config.rl.sampling.temperature
    given = policy, tokenizer, settings.top_k, temperature
    teacher = Teacher("rl.teacher.folder", settings.folder, *given)
    distillation = teacher.loss(
        divergence=settings.divergence, kl_weight=settings.kl_weight, weights="loss_weights"
    )
    return teacher, LossWithTeacher(loss, settings.policy_weight, distillation)
