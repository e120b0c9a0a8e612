"""Importance correction for tokens that the generator drew from another policy than the trainer's.

With m = log(old / generator) of each sampled token, where `old` is the trainer's policy when the step
began, tokens get a weight

    token     min(exp(m), cap)                            from the token's own ratio
    sequence  min(exp(sum of m over the sequence), cap)   from the whole completion's ratio

(truncated importance sampling: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), and tokens whose m is too far from 0 leave the loss, but not its
denominators.

B rows, T slots per row, see `torchtitan.rl.types`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.rl.types import LossInputs

CORRECTIONS = ("none", "token", "sequence")
_NAMES = f"one of {', '.join(CORRECTIONS)}"


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights and masks by the ratio of the trainer's old policy to the generator's.

    Raises ValueError for values out of range.
    """

    weighting: str = "none"
    cap: float = 2.0  # the largest weight, at least 1
    max_token: float = math.inf  # tokens are masked if |m| is above it, in nats
    # Sequences are masked if |the mean of m over the tokens in the loss| is above it, in nats.
    max_sequence: float = math.inf

    def __post_init__(self) -> None:
        for key, value, is_allowed, rule in (
            ("correction", self.weighting, self.weighting in CORRECTIONS, _NAMES),
            ("correction_cap", self.cap, 1 <= self.cap < math.inf, "at least 1 and finite"),
            ("max_token_mismatch", self.max_token, self.max_token > 0, "above 0 nats"),
            ("max_sequence_mismatch", self.max_sequence, self.max_sequence > 0, "above 0 nats"),
        ):
            if not is_allowed:
                raise ValueError(
                    f"rl.loss.{key} must be {rule}, got {value!r}; correct it or leave it out"
                )

    @property
    def masks(self) -> bool:
        return min(self.max_token, self.max_sequence) < math.inf

    @property
    def is_on(self) -> bool:
        return self.masks or self.weighting != "none"

    @property
    def needs_whole_sequences(self) -> bool:
        return self.weighting == "sequence" or self.max_sequence < math.inf

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = {
            "mismatch_mean": self.is_on,
            "mismatch_max": self.is_on,
            "correction_mean": self.weighting != "none",
            "correction_truncated_frac": self.weighting != "none",
            "truncated_sequences_count": self.weighting == "sequence",
            "masked_frac": self.masks,
            "masked_sequences_count": self.max_sequence < math.inf,
        }
        return tuple(name for name, is_measured in names.items() if is_measured)

    @torch.no_grad()
    def __call__(
        self, old_logprobs: Tensor, batch: LossInputs, max_log_ratio: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (factors of the policy loss [B, T], True for tokens to leave out of all terms [B, T],
        sums and counts by name as in `LossOutput`).

        old_logprobs: [B, T] of the labels. max_log_ratio: so that exp does not overflow.
        """
        in_loss = batch["loss_mask"] != 0
        m = (old_logprobs - batch["generator_logprobs"]).masked_fill(~in_loss, 0)
        is_masked = m.abs() > self.max_token
        of_weight = m
        measured = {"mismatch_mean": m.abs().sum(), "mismatch_max": m.abs().max()}
        if self.needs_whole_sequences:
            sums, counts, index = sequence_sums(m, in_loss, batch["sequence_ids"])
            is_far = (sums / counts.clamp(min=1)).abs() > self.max_sequence
            is_masked = is_masked | (is_far.gather(1, index) & in_loss)
            measured["masked_sequences_count"] = is_far.sum()
            is_truncated = (counts > 0) & (sums > math.log(self.cap))
            measured["truncated_sequences_count"] = is_truncated.sum()
            if self.weighting == "sequence":
                of_weight = sums.gather(1, index).masked_fill(~in_loss, 0)
        measured["masked_frac"] = is_masked.sum()
        weights = torch.ones_like(m)
        if self.weighting != "none":
            largest = min(math.log(self.cap), max_log_ratio)
            weights = of_weight.clamp(-max_log_ratio, largest).exp()
            measured["correction_mean"] = (weights * in_loss).sum()
            measured["correction_truncated_frac"] = (of_weight > math.log(self.cap)).sum()
        return weights, is_masked, {name: measured[name] for name in self.metric_names}


def sequence_sums(
    values: Tensor, in_loss: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sums of the values in the loss per sequence, their counts, each slot's sequence), [B, T].

    In sums and counts, entry i of a row belongs to its sequence number i. Padding gets sequence 0.
    """
    index = sequence_ids.clamp(min=0)
    counted = (in_loss & (sequence_ids >= 0)).to(values.dtype)
    empty = torch.zeros_like(values)
    sums = empty.scatter_add(1, index, values * counted)
    return sums, empty.scatter_add(1, index, counted), index
