"""What all losses of the RL trainer share: the weighted sum, KL and entropy terms, and metrics.

B rows, T slots per row; what belongs to a token is pre-shifted, see `torchtitan.rl.types`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.components.loss import weighted_sum
from torchtitan.rl.losses.kl import kl_divergence


@dataclass(frozen=True, eq=False)
class LossOutput:
    """loss: a scalar to call backward on. metrics: scalars without gradient.

    Metrics of several microbatches and ranks are summed, or for names that end in `_max` their
    maximum is taken; `finalize_metrics` then makes means of the sums.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss(ABC):
    """Per-token losses of one kind, summed with the weights of the batch.

    Subclasses say what the loss of one token is; the reduction is always the sum over tokens of
    weight * (policy loss + kl_coef * KL - entropy_coef * entropy).

    max_log_ratio: log-ratios are clamped to plus and minus this, so that exp does not overflow.
    kl_coef, kl_type: divergence from `ref_logprobs` in the batch; see `kl_divergence`.
    """

    needs_whole_sequences: ClassVar[bool] = False
    """Whether the loss of a token depends on others of its sequence"""
    has_generator: ClassVar[bool] = True
    """Whether it asks what the generator thought of a token"""
    token_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of what `per_token` measures"""

    max_log_ratio: float = 10.0
    kl_coef: float = 0.0
    kl_type: str = "k3"
    entropy_coef: float = 0.0

    @abstractmethod
    def per_token(
        self, logprobs: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy loss of each token [B, T], and what to report of each, [B, T] too.

        logprobs: [B, T] of the labels under the policy that learns. batch: the entries of
            `TrainingMicrobatch.engine_batch()`. What is returned where loss_mask is 0 counts
            nowhere, but has to be finite.
        """

    @property
    def needs_entropy(self) -> bool:
        """Whether it has to be given the entropy of each token's distribution."""
        return self.entropy_coef > 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Keys of the metrics in every output, in order; for ranks that have no output."""
        names = ["policy_loss"]
        if self.has_generator:
            names += ["logprob_diff_mean", "logprob_diff_max", "kl_generator"]
        names += self.token_metrics
        if self.needs_entropy:
            names += ["entropy"]
        if self.kl_coef > 0:
            names += ["kl_ref", "kl_loss"]
        return tuple(names)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Mapping[str, Tensor]
    ) -> LossOutput:
        """Return the loss of one microbatch and its metrics.

        logprobs, entropy: [B, T]; entropy may be None unless `needs_entropy`. batch: see
            `per_token`.
        Raises ValueError if the batch lacks what the loss needs.
        """
        self._check_inputs(entropy, batch)
        weights, mask = batch["loss_weights"], batch["loss_mask"]
        losses, measured = self.per_token(logprobs, batch)
        policy_loss = loss = weighted_sum(losses, weights)

        metrics = {"policy_loss": policy_loss}
        with torch.no_grad():
            metrics |= {name: weighted_sum(values, mask) for name, values in measured.items()}
            if self.has_generator:
                metrics |= self._distance_to_generator(logprobs, batch)
        if self.needs_entropy:
            metrics["entropy"] = weighted_sum(entropy, mask)
            loss = loss - self.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_coef > 0:
            kl = kl_divergence(logprobs, batch["ref_logprobs"], self.kl_type, self.max_log_ratio)
            metrics["kl_ref"] = weighted_sum(kl, mask)
            metrics["kl_loss"] = self.kl_coef * weighted_sum(kl, weights)
            loss = loss + metrics["kl_loss"]
        return LossOutput(loss, {name: metrics[name].detach() for name in self.metric_names})

    def log_ratio(self, logprobs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """log(policy / generator) of each token, clamped; 0 where the loss does not count."""
        log_ratio = logprobs - batch["generator_logprobs"]
        log_ratio = log_ratio.masked_fill(batch["loss_mask"] == 0, 0)
        return log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio)

    def _distance_to_generator(
        self, logprobs: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        difference = logprobs - batch["generator_logprobs"]
        difference = difference.masked_fill(batch["loss_mask"] == 0, 0)
        log_ratio = self.log_ratio(logprobs, batch)
        return {
            "logprob_diff_mean": difference.abs().sum(),
            "logprob_diff_max": difference.abs().max(),
            "kl_generator": (torch.expm1(log_ratio) - log_ratio).sum(),
        }

    def _check_inputs(self, entropy: Tensor | None, batch: Mapping[str, Tensor]) -> None:
        if self.needs_entropy and entropy is None:
            raise ValueError(
                f"rl.loss.entropy_coef = {self.entropy_coef} needs the entropy of every token, got "
                f"none; have it computed with TokenLogProbs(entropy=True)"
            )
        if self.kl_coef > 0 and batch.get("ref_logprobs") is None:
            raise ValueError(
                f"rl.loss.kl_coef = {self.kl_coef} needs ref_logprobs in the samples, got none; "
                f"fill them by a forward pass of the reference policy, or set it to 0"
            )


def finalize_metrics(metrics: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return means over the tokens in the loss, from metrics reduced over microbatches and ranks.

    Maxima (`_max`) and parts of the loss (`_loss`), which have their weights, stay as they are.
    num_tokens: tokens in the loss, over the same microbatches and ranks; 0 gives zeros.
    """
    return {
        name: value if name.endswith(("_max", "_loss")) else value / max(num_tokens, 1)
        for name, value in metrics.items()
    }
