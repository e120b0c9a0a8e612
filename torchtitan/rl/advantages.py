"""From the rewards of completions to their advantages, by comparison within a prompt's group."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BASELINES = ("group_mean", "rloo", "none")

# Beyond it squares and sums of rewards, and fp32 products with them, would overflow.
LARGEST_REWARD = 1e18

# Standard deviations below this are rounding: the group's rewards are equal.
_SMALLEST_STD = 1e-8


@dataclass(frozen=True)
class AdvantageEstimator:
    """Advantages of the completions of one step.

    With n rewards r of one prompt and their mean m:

        group_mean  r - m                  (Shao et al. 2024, arXiv:2402.03300)
        rloo        (r - m) n / (n - 1)    r minus the mean of the others (Ahmadian et al. 2024,
                                           arXiv:2402.14740); 0 for a completion without others
        none        r

    std: divide by the standard deviation of the group's rewards, over n and not n - 1; where they
    are all equal the advantages are 0.
    """

    name: str = "group_mean"
    std: bool = False

    def __post_init__(self) -> None:
        if self.name not in BASELINES:
            raise ValueError(
                f"rl.advantage.name must be one of {', '.join(BASELINES)}, got {self.name!r}"
            )
        if self.std and self.name == "none":
            raise ValueError(
                "rl.advantage.std divides what is left of a reward after its group's mean, got "
                "rl.advantage.name = 'none'; take 'group_mean', or set std to false"
            )

    def __call__(self, rewards: Sequence[float], group_ids: Sequence[Hashable]) -> list[float]:
        """Return one advantage per reward; group_ids: equal for the completions of a prompt.

        Raises ValueError for a reward that is not finite, or very large.
        """
        groups: dict[Hashable, list[float]] = {}
        for reward, group in zip(rewards, group_ids, strict=True):
            if not (isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD):
                raise ValueError(
                    f"rewards must be finite numbers, got {reward!r} in group {group!r} (at most "
                    f"{LARGEST_REWARD:g} in size); correct the reward function"
                )
            groups.setdefault(group, []).append(reward)
        if self.name == "none":
            return list(map(float, rewards))
        # What to subtract from a group's rewards, and what to multiply by then.
        shift_and_scale: dict[Hashable, tuple[float, float]] = {}
        for group, own in groups.items():
            n = len(own)
            # Equal rewards have advantages of exactly 0, which a rounded mean would miss.
            mean = math.fsum(own) / n if min(own) < max(own) else own[0]
            scale = n / max(n - 1, 1) if self.name == "rloo" else 1.0
            if self.std:
                std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in own) / n)
                scale = scale / std if std > _SMALLEST_STD else 0.0
            shift_and_scale[group] = mean, scale
        pairs = zip(rewards, (shift_and_scale[group] for group in group_ids), strict=True)
        return [(reward - shift) * scale for reward, (shift, scale) in pairs]


@dataclass(frozen=True)
class OverlongPenalty:
    """What a completion loses for coming near the longest one (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    Nothing up to max_tokens - num_tokens tokens; from there it grows linearly to `largest` at
    max_tokens, which a completion that was cut off has. num_tokens: 0 costs nothing.
    """

    max_tokens: int
    num_tokens: int = 0
    largest: float = 1.0

    def __call__(self, length: int) -> float:
        """What is subtracted from the reward of a completion of this many tokens."""
        over = length - (self.max_tokens - self.num_tokens)
        return self.largest * over / self.num_tokens if self.num_tokens and over > 0 else 0.0


def advantage_metrics(
    advantages: Sequence[float], group_ids: Sequence[Hashable]
) -> dict[str, float]:
    """Mean and standard deviation of all advantages, and the share of groups in which all are 0.

    Such groups teach nothing. Zeros if there are no advantages.
    """
    n = max(len(advantages), 1)
    mean = math.fsum(advantages) / n
    groups = set(group_ids)
    others = {group for a, group in zip(advantages, group_ids, strict=True) if a != 0}
    return {
        "advantage_mean": mean,
        "advantage_std": math.sqrt(math.fsum((a - mean) ** 2 for a in advantages) / n),
        "zero_advantage_groups": (len(groups) - len(others)) / max(len(groups), 1),
    }
