"""Importance correction for tokens sampled from a policy that differs from the trainer's.

m = log(old / generator) is the log-ratio of a sampled token's probabilities, where `old` is the trainer's
policy at the start of the step. The token gets the weight

    token     min(exp(m), cap)                            from the token's own ratio
    sequence  min(exp(sum of m over the sequence), cap)   from the whole completion's ratio

(truncated importance sampling: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"). Tokens whose |m| is too large are masked: they leave the loss, but
denominators still count them.

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
    """Token weights and masks from the ratio of the trainer's old policy to the generator's policy.

    Raises ValueError for values out of range.
    """

    weighting: str = "none"
    cap: float = 2.0  # the largest weight, at least 1
    max_token: float = math.inf  # tokens are masked if |m| is above it, in nats
    # Sequences are masked if |mean m of their tokens in the loss| is above it, in nats.
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
        """Return (weights of the policy loss [B, T], mask of tokens to leave out of all loss terms [B, T],
        metrics as in `LossOutput`).

        old_logprobs: [B, T] of the labels. max_log_ratio: clamps log-ratios so exp can't overflow.
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
    """Return (sum of the values in the loss, number of these, sequence index of each slot), all [B, T].

    In sums and counts, column i of a row is for its sequence i. Padding slots have sequence index 0.
    """
    index = sequence_ids.clamp(min=0)
    counted = (in_loss & (sequence_ids >= 0)).to(values.dtype)
    empty = torch.zeros_like(values)
    sums = empty.scatter_add(1, index, values * counted)
    return sums, empty.scatter_add(1, index, counted), index
