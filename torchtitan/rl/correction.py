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


@dataclass(frozen=True)
class ImportanceCorrection:
    """The settings of the correction, which every policy loss has. Raises ValueError if out of range.

    max_log_ratio: log-ratios are clamped to [-max_log_ratio, max_log_ratio], so that exp is finite.
    correction: which weights to use: none, token or sequence.
    correction_cap: the largest weight, at least 1.
    max_token_mismatch: tokens with a larger |m|, in nats, are masked.
    max_sequence_mismatch: if the mean m of a sequence's tokens in the loss has a larger absolute value,
        in nats, the sequence is masked.
    """

    max_log_ratio: float = 10.0
    correction: str = "none"
    correction_cap: float = 2.0
    max_token_mismatch: float = math.inf
    max_sequence_mismatch: float = math.inf

    def __post_init__(self) -> None:
        rules = {
            "correction": (("none", "token", "sequence").__contains__, "none, token or sequence"),
            "correction_cap": (lambda cap: 1 <= cap < math.inf, "at least 1 and finite"),
            "max_token_mismatch": (lambda nats: nats > 0, "above 0 nats"),
            "max_sequence_mismatch": (lambda nats: nats > 0, "above 0 nats"),
        }
        for name, (is_allowed, rule) in rules.items():
            if not is_allowed(value := getattr(self, name)):
                raise ValueError(
                    f"rl.loss.{name} must be {rule}, got {value!r}; correct it or leave it out"
                )

    @property
    def masks(self) -> bool:
        return min(self.max_token_mismatch, self.max_sequence_mismatch) < math.inf

    @property
    def corrects(self) -> bool:
        """True if the loss weights or masks tokens by their ratio exp(m)."""
        return self.masks or self.correction != "none"

    @property
    def needs_whole_sequences(self) -> bool:
        """True if the loss of a token depends on other tokens of its sequence."""
        return self.correction == "sequence" or self.max_sequence_mismatch < math.inf

    @torch.no_grad()
    def weights_and_mask(
        self, old_logprobs: Tensor, batch: LossInputs
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (weights of the policy loss [B, T], masked tokens [B, T], metrics as in `LossOutput`).

        Masked tokens are left out of all loss terms. old_logprobs: log-probs of the labels, [B, T].
        """
        in_loss, log_cap = batch["loss_mask"] != 0, math.log(self.correction_cap)
        m = (old_logprobs - batch["generator_logprobs"]).masked_fill(~in_loss, 0)
        is_masked = m.abs() > self.max_token_mismatch
        of_weight = m
        measured = {"mismatch_mean": m.abs().sum(), "mismatch_max": m.abs().max()}
        if self.needs_whole_sequences:
            sums, counts, index = sequence_sums(m, in_loss, batch["sequence_ids"])
            is_far = (sums / counts.clamp(min=1)).abs() > self.max_sequence_mismatch
            is_masked = is_masked | (is_far.gather(1, index) & in_loss)
            if self.max_sequence_mismatch < math.inf:
                measured["masked_sequences_count"] = is_far.sum()
            if self.correction == "sequence":
                of_weight = sums.gather(1, index).masked_fill(~in_loss, 0)
                is_truncated = (counts > 0) & (sums > log_cap)
                measured["truncated_sequences_count"] = is_truncated.sum()
        if self.masks:
            measured["masked_frac"] = is_masked.sum()
        weights = torch.ones_like(m)
        if self.correction != "none":
            largest = min(log_cap, self.max_log_ratio)
            weights = of_weight.clamp(-self.max_log_ratio, largest).exp()
            measured["correction_mean"] = (weights * in_loss).sum()
            measured["correction_truncated_frac"] = (of_weight > log_cap).sum()
        return weights, is_masked, measured


def sequence_sums(
    values: Tensor, in_loss: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum values over each sequence's tokens in the loss; return (sums, counts, indices), all [B, T].

    Column i of sums and counts belongs to sequence i of the row; counts are numbers of tokens in the loss.
    indices: the sequence index of each slot, 0 for padding.
    """
    index = sequence_ids.clamp(min=0)
    counted = (in_loss & (sequence_ids >= 0)).to(values.dtype)
    empty = torch.zeros_like(values)
    sums = empty.scatter_add(1, index, values * counted)
    return sums, empty.scatter_add(1, index, counted), index
