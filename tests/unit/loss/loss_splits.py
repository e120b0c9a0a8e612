"""Sequences of one optimizer step, split at random, and each aggregation's gradient by definition.

For tests and benchmarks. The model is a linear layer, F features and V classes, under cross
entropy, a policy's or a value's loss.
"""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.loss.aggregation import (
    aggregation_weights,
    weighted_cross_entropy,
    weighted_sum,
)
from torchtitan.loss.cross_entropy import IGNORE_INDEX

N_FEATURES, N_CLASSES = 6, 11
NORM = 16.0


@dataclass(frozen=True)
class Sequence:
    """features: [T, F]. labels, mask, targets (advantages or returns): [T]. prompt: its prompt's id."""

    features: Tensor
    labels: Tensor
    targets: Tensor
    mask: Tensor
    prompt: int


def random_step(dtype: torch.dtype, seed: int = 0) -> list[Sequence]:
    """12 sequences of 0 to 20 tokens for 5 prompts; two are fully masked and one is empty."""
    generator = torch.Generator().manual_seed(seed)
    step = []
    for i in range(12):
        length = 0 if i == 3 else int(torch.randint(1, 21, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        if i in (5, 8):
            mask[:] = False
        features = torch.randn(length, N_FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, N_CLASSES, (length,), generator=generator)
        targets = torch.randn(length, generator=generator, dtype=torch.float64)
        step.append(Sequence(features.to(dtype), labels, targets.to(dtype), mask, prompt=i % 5))
    return step


def weights_of_step(step: Items[Sequence], mode: str, **options) -> list[Tensor]:
    return aggregation_weights(
        [sequence.mask for sequence in step],
        mode,
        norm=NORM,
        prompt_ids=[sequence.prompt for sequence in step],
        **options,
    )


# ---- losses of packed rows, and of each token by definition ----


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    index = labels.clamp(min=0)[..., None]
    return logits.log_softmax(-1).gather(-1, index)[..., 0]


class Loss(NamedTuple):
    """weighted: (logits [B, T, V], labels, targets, weights [B, T]) -> loss. per_token: -> [T]."""

    weighted: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_token: Callable[[Tensor, Tensor, Tensor], Tensor]


LOSSES = {
    "sft": Loss(
        lambda z, y, _, w: weighted_cross_entropy(z, y, {"loss_weights": w}),
        lambda z, y, _: F.cross_entropy(z, y, reduction="none"),
    ),
    "policy": Loss(
        lambda z, y, advantages, w: -weighted_sum(_logprobs(z, y) * advantages, w),
        lambda z, y, advantages: -advantages * (z[range(len(y)), y] - z.logsumexp(-1)),
    ),
    "value": Loss(
        lambda z, _, returns, w: weighted_sum((z[..., 0] - returns) ** 2, w) / 2,
        lambda z, _, returns: F.mse_loss(z[:, 0], returns, reduction="none") / 2,
    ),
}


# ---- splits ----


class Microbatch(NamedTuple):
    """The sequences' indices in each row, and the tokens of padding after the longest row."""

    rows: list[list[int]]
    n_more: int


def random_split(n: int, split: random.Random, n_ranks: int | None = None) -> list[list]:
    """Deal the numbers below n in random order to the microbatches of 1 to 4 ranks.

    Ranks have different numbers of microbatches, up to 12; some are empty or have empty rows.
    """
    order = split.sample(range(n), n)
    n_ranks = n_ranks or split.randint(1, 4)
    # Only the first rank always has a microbatch.
    ranks = [[[] for _ in range(split.randint(r == 0, 12))] for r in range(n_ranks)]
    everywhere = [members for rank in ranks for members in rank]
    for i in order:
        split.choice(everywhere).append(i)

    def packed(members: list[int]) -> Microbatch:
        rows: list[list[int]] = [[] for _ in range(split.randint(1, len(members) + 1))]
        for i in members:
            split.choice(rows).append(i)
        return Microbatch(rows, split.randint(0, 3))

    return [[packed(members) for members in rank] for rank in ranks]


def pack(
    step: list[Sequence], weights: Mapping[int, Tensor], microbatch: Microbatch
) -> tuple[Tensor, ...]:
    """Features [B, T, F]; labels, targets, weights [B, T] of rows of sequences, padded at the end."""
    rows, n_more = microbatch
    length = n_more + max(sum(len(step[i].labels) for i in row) for row in rows)

    def padded(parts: list[Tensor], empty: Tensor, value: float) -> Tensor:
        joined = torch.cat([empty, *parts])
        more = joined.new_full((length - len(joined), *joined.shape[1:]), value)
        return torch.cat((joined, more))

    features, labels, targets, row_weights = [], [], [], []
    for row in rows:
        features.append(padded([step[i].features for i in row], step[0].features[:0], 7.0))
        labels.append(padded([step[i].labels for i in row], step[0].labels[:0], IGNORE_INDEX))
        targets.append(padded([step[i].targets for i in row], step[0].targets[:0], 7.0))
        row_weights.append(padded([weights[i] for i in row], step[0].targets[:0], 0.0))
    return tuple(torch.stack(x) for x in (features, labels, targets, row_weights))


def accumulated(
    step: list[Sequence],
    weights: Items[Tensor] | Mapping[int, Tensor],
    theta: Tensor,
    microbatches: list[Microbatch],
    loss: str = "sft",
) -> tuple[float, Tensor]:
    """Loss and gradient with respect to theta [F, V], summed over microbatches."""
    theta = theta.detach().requires_grad_()
    theta.grad = torch.zeros_like(theta)
    total = 0.0
    for microbatch in microbatches:
        features, *rest = pack(step, weights, microbatch)
        value = LOSSES[loss].weighted(features @ theta, *rest)
        value.backward()
        total += value.item()
    return total, theta.grad


def all_ranks(split: list[list[Microbatch]]) -> list[Microbatch]:
    return [microbatch for rank in split for microbatch in rank]


# ---- the reference: each aggregation by definition, sequence by sequence ----


def aggregated_loss(step: list[Sequence], mode: str, theta: Tensor, loss: str = "sft") -> Tensor:
    sums = []
    for sequence in step:
        logits = sequence.features @ theta
        losses = LOSSES[loss].per_token(logits, sequence.labels, sequence.targets)
        sums.append(losses[sequence.mask].sum())
    counts = [int(sequence.mask.sum()) for sequence in step]
    counted = [i for i, n in enumerate(counts) if n]
    if mode == "token-sum":
        return sum(sums)
    if mode == "token-mean":
        return sum(sums) / sum(counts)
    if mode == "seq-mean-token-sum":
        return sum(sums[i] for i in counted) / len(counted)
    if mode == "seq-mean-token-sum-norm":
        return sum(sums[i] / NORM for i in counted) / len(counted)
    if mode == "seq-mean-token-mean":
        return sum(sums[i] / counts[i] for i in counted) / len(counted)
    assert mode == "prompt-mean"
    means = []
    for prompt in {step[i].prompt for i in counted}:
        members = [i for i in counted if step[i].prompt == prompt]
        means.append(sum(sums[i] for i in members) / sum(counts[i] for i in members))
    return sum(means) / len(means)


def random_theta(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N_FEATURES, N_CLASSES, generator=generator, dtype=torch.float64).to(dtype)


def expected_gradient(mode: str, theta: Tensor, loss: str = "sft") -> tuple[float, Tensor]:
    """Loss and gradient in float64."""
    theta = theta.detach().double().clone().requires_grad_()
    value = aggregated_loss(random_step(torch.float64), mode, theta, loss)
    value.backward()
    return value.item(), theta.grad


def relative_difference(gradient: Tensor, expected: Tensor) -> float:
    return ((gradient.double() - expected).abs().max() / expected.abs().max()).item()


def largest_differences(
    mode: str, dtype: torch.dtype, num_splits: int, loss: str = "sft"
) -> tuple[float, float]:
    """Largest relative difference of (loss, gradient) between random splits and the definition."""
    step, theta = random_step(dtype), random_theta(dtype)
    expected, gradient = expected_gradient(mode, theta, loss)
    weights = weights_of_step(step, mode, dtype=dtype)
    worst_loss = worst_gradient = 0.0
    for seed in range(num_splits):
        microbatches = all_ranks(random_split(len(step), random.Random(seed)))
        value, grad = accumulated(step, weights, theta, microbatches, loss)
        worst_loss = max(worst_loss, abs(value / expected - 1))
        worst_gradient = max(worst_gradient, relative_difference(grad, gradient))
    return worst_loss, worst_gradient
