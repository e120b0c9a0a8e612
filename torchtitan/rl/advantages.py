"""Computes advantages from rewards: relative to the other completions of a prompt, or with a critic."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtitan.rl.rewards import LARGEST_REWARD

# Rewards or advantages with a standard deviation below this are equal up to rounding.
_SMALLEST_STD = 1e-8


@dataclass(frozen=True)
class AdvantageEstimator:
    """Computes the advantages of the completions of one step.

    One prompt's n completions have the rewards r, with mean m:

        group_mean  r - m                  (Shao et al. 2024, arXiv:2402.03300)
        rloo        (r - m) n / (n - 1)    r minus the mean of the other rewards (Ahmadian et al.
                                           2024, arXiv:2402.14740); 0 if n = 1
        none        r

    std: divide by the standard deviation of the prompt's rewards (divisor n). If all rewards are equal,
    the advantages are 0.
    """

    name: str = "group_mean"
    std: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("group_mean", "rloo", "none"):
            raise ValueError(
                f"rl.advantage.name must be group_mean, rloo or none, got {self.name!r}; for 'gae', use the class GAE"
            )
        if self.std and self.name == "none":
            raise ValueError(
                "rl.advantage.std divides a reward's difference from its group's mean, got "
                "rl.advantage.name = 'none'; take 'group_mean', or set std to false"
            )

    def __call__(self, rewards: Sequence[float], group_ids: Sequence[Hashable]) -> list[float]:
        """Return one advantage per reward. group_ids: the same id for all completions of a prompt.

        Raises ValueError if a reward is not finite, or its absolute value is above LARGEST_REWARD.
        """
        groups: dict[Hashable, list[float]] = {}
        for reward, group in zip(rewards, group_ids, strict=True):
            if not (isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD):
                raise ValueError(
                    f"rewards must be finite numbers of at most {LARGEST_REWARD:g} in size, got "
                    f"{reward!r} in group {group!r}; correct the reward function"
                )
            groups.setdefault(group, []).append(reward)
        if self.name == "none":
            return list(map(float, rewards))
        mean_and_scale = {}
        for group, own in groups.items():
            n = len(own)
            # Equal rewards must give advantages of exactly 0, so their mean must not be rounded.
            mean = math.fsum(own) / n if min(own) < max(own) else own[0]
            scale = n / max(n - 1, 1) if self.name == "rloo" else 1.0
            if self.std:
                std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in own) / n)
                scale = scale / std if std > _SMALLEST_STD else 0.0
            mean_and_scale[group] = mean, scale
        pairs = zip(rewards, (mean_and_scale[group] for group in group_ids), strict=True)
        return [(reward - mean) * scale for reward, (mean, scale) in pairs]


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    V_t is the value before sampled token t, and 0 after the last token. r_t is the token's reward,
    which is 0 except for the last token.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}

    whiten: normalise all advantages of a call to mean 0 and standard deviation 1; equal advantages become 0.
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(
                f"rl.advantage.gamma and lam must be 0 to 1, got {self.gamma} and {self.lam}; 1 is usual"
            )

    def __call__(
        self, rewards: Sequence[float], values: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (advantages, returns); returns are the critic's targets: advantage before whitening + value.

        values: one tensor [n] for each completion of n sampled tokens. Advantages and returns have the
        same shapes, in fp64.
        """
        lengths = [len(of_tokens) for of_tokens in values]
        if not sum(lengths):
            return list(values), list(values)
        # [number of completions, length of the longest completion]
        padded = pad_sequence([v.double() for v in values], batch_first=True)
        ends = torch.tensor(lengths)
        has_tokens, is_token = ends > 0, torch.arange(padded.shape[1]) < ends[:, None]
        delta = -padded
        of_completions = torch.tensor(rewards, dtype=torch.float64)
        delta[has_tokens, ends[has_tokens] - 1] += of_completions[has_tokens]
        delta[:, :-1] += self.gamma * padded[:, 1:]
        # Deltas of padding are 0, so the recursion of each completion begins at its last token.
        advantages = torch.zeros_like(delta)
        later = advantages[:, 0]
        for t in reversed(range(delta.shape[1])):
            advantages[:, t] = later = delta[:, t] + self.gamma * self.lam * later
        returns = (advantages + padded)[is_token]
        of_tokens = advantages[is_token]
        if self.whiten:
            std = of_tokens.std(correction=0)
            scale = torch.where(std > _SMALLEST_STD, 1 / std, 0.0)
            of_tokens = (of_tokens - of_tokens.mean()) * scale
        return list(of_tokens.split(lengths)), list(returns.split(lengths))


@dataclass(frozen=True)
class OverlongPenalty:
    """The penalty for completions near the length limit (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    The penalty grows linearly from 0 at max_tokens - num_tokens tokens to `largest` at max_tokens.
    """

    max_tokens: int
    num_tokens: int = 0  # 0 turns the penalty off
    largest: float = 1.0

    def __call__(self, length: int) -> float:
        """Return the number to subtract from the reward of a completion of this many tokens."""
        over = length - (self.max_tokens - self.num_tokens)
        return self.largest * over / self.num_tokens if self.num_tokens and over > 0 else 0.0


def mean_and_std(advantages: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation (divisor n) of advantages as metrics, both 0 for an empty list."""
    n = max(len(advantages), 1)
    mean = math.fsum(advantages) / n
    variance = math.fsum((a - mean) ** 2 for a in advantages) / n
    return {"advantage_mean": mean, "advantage_std": math.sqrt(variance)}


def advantage_metrics(
    advantages: Sequence[float], group_ids: Sequence[Hashable]
) -> dict[str, float]:
    """Return `mean_and_std`, and the share of groups whose advantages are all 0 (no policy gradient)."""
    groups = set(group_ids)
    that_teach = {group for a, group in zip(advantages, group_ids, strict=True) if a != 0}
    return {
        **mean_and_std(advantages),
        "zero_advantage_groups": (len(groups) - len(that_teach)) / max(len(groups), 1),
    }
