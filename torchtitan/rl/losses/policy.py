"""The losses of policy optimization, per token.

With r = exp(logprob - generator_logprob) the ratio of the learning policy to the one that
sampled, and A the advantage:

    grpo                 -min(r A, clip(r, 1 - eps, 1 + eps) A)
    dapo                 the same with a lower and an upper eps
    gspo                 the same with r the geometric mean of the sequence's ratios
    cispo                -stop_gradient(clip(r, 1 - low, 1 + high)) A logprob
    importance_sampling  -r A
    cross_entropy        -logprob
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.rl.losses.base import PolicyLoss

Batch = Mapping[str, Tensor]
Measured = dict[str, Tensor]


@dataclass(frozen=True)
class _ClippedRatioLoss(PolicyLoss):
    """PPO's clipped ratio (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""

    token_metrics: ClassVar[tuple[str, ...]] = ("ratio_mean", "ratio_clipped_frac")

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 a ratio may go."""
        raise NotImplementedError

    def ratio(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """The ratio of each token, [B, T]."""
        return self.log_ratio(logprobs, batch).exp()

    def per_token(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Measured]:
        ratio, advantages = self.ratio(logprobs, batch), batch["advantages"]
        low, high = self.clip_range
        gain, clipped_gain = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
        measured = {"ratio_mean": ratio, "ratio_clipped_frac": clipped_gain < gain}
        return -torch.minimum(gain, clipped_gain), measured


@dataclass(frozen=True)
class GRPOLoss(_ClippedRatioLoss):
    """The clipped ratio, as far below 1 as above.

    Shao et al. 2024 (arXiv:2402.03300), eq. 3, whose KL term is `kl_coef`, and whose division by
    the lengths is the batch's aggregation "seq-mean-token-mean".
    """

    clip_eps: float = 0.2

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_eps, self.clip_eps


@dataclass(frozen=True)
class DAPOLoss(_ClippedRatioLoss):
    """The clipped ratio with bounds of their own below and above 1.

    Yu et al. 2025 (arXiv:2503.14476), eq. 8. The wider upper bound lets improbable tokens grow,
    which keeps entropy up.
    """

    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.28

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.ratio_clip_low, self.ratio_clip_high


@dataclass(frozen=True)
class GSPOLoss(_ClippedRatioLoss):
    """One clipped ratio for each sequence, the geometric mean of its tokens'.

    Zheng et al. 2025 (arXiv:2507.18071) in the form per token: the value is that of the
    sequence's ratio, the gradient each token's own, which is the same where a sequence has one
    advantage and one weight. The paper's objective has the aggregation "seq-mean-token-mean".
    A sequence must not be split between ranks.
    """

    needs_whole_sequences: ClassVar[bool] = True

    ratio_clip_low: float = 3e-4
    ratio_clip_high: float = 4e-4

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.ratio_clip_low, self.ratio_clip_high

    def ratio(self, logprobs: Tensor, batch: Batch) -> Tensor:
        log_ratio = self.log_ratio(logprobs.detach(), batch)
        mean = mean_of_sequences(log_ratio, batch["loss_mask"], batch["sequence_ids"])
        return (mean + (logprobs - logprobs.detach())).exp()


@dataclass(frozen=True)
class CISPOLoss(PolicyLoss):
    """Clips the weight of a token instead of its gradient, so that every token is learned from.

    MiniMax 2025 (arXiv:2506.13585), eq. 4 and 5, where nothing is clipped from below.
    """

    token_metrics: ClassVar[tuple[str, ...]] = ("ratio_mean", "ratio_clipped_frac")

    ratio_clip_low: float = 1.0
    ratio_clip_high: float = 0.28

    def per_token(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Measured]:
        ratio = self.log_ratio(logprobs.detach(), batch).exp()
        clipped = ratio.clamp(1 - self.ratio_clip_low, 1 + self.ratio_clip_high)
        measured = {"ratio_mean": ratio, "ratio_clipped_frac": clipped != ratio}
        return -clipped * batch["advantages"] * logprobs, measured


@dataclass(frozen=True)
class ImportanceSamplingLoss(PolicyLoss):
    """The policy gradient, corrected for the policy that sampled; nothing is clipped."""

    token_metrics: ClassVar[tuple[str, ...]] = ("ratio_mean",)

    def per_token(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Measured]:
        ratio = self.log_ratio(logprobs, batch).exp()
        return -ratio * batch["advantages"], {"ratio_mean": ratio}


@dataclass(frozen=True)
class CrossEntropyLoss(PolicyLoss):
    """Minus the log-prob of the label: supervised learning. No advantages, no generator."""

    has_generator: ClassVar[bool] = False

    def per_token(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Measured]:
        return -logprobs, {}


def mean_of_sequences(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return for each token the mean over its sequence of the values whose mask is not 0.

    values, mask: [B, T]. sequence_ids: [B, T] int, from 0 in each row, below T; -1 in padding,
    where the result means nothing. 0 for sequences without such a value.
    """
    index = sequence_ids.clamp(min=0)
    in_loss = ((mask != 0) & (sequence_ids >= 0)).to(values.dtype)
    empty = torch.zeros_like(values)
    sums = empty.scatter_add(1, index, values * in_loss)
    counts = empty.scatter_add(1, index, in_loss)
    return (sums / counts.clamp(min=1)).gather(1, index)
