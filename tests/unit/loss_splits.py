"""Sequences of one optimizer step, split at random, and the gradient by each aggregation's text.

For tests and benchmarks. The model is a linear layer with cross entropy: F features, V classes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.components.loss import (
    IGNORE_INDEX,
    aggregation_weights,
    weighted_cross_entropy,
)

N_FEATURES, N_CLASSES = 6, 11
NORM = 16.0
NUM_SPLITS = 60


@dataclass(frozen=True)
class Sequence:
    """features: [T, F]. labels, mask: [T]. prompt: which one it answers."""

    features: Tensor
    labels: Tensor
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
        step.append(Sequence(features.to(dtype), labels, mask, prompt=i % 5))
    return step


def weights_of_step(step: list[Sequence], mode: str, **options) -> list[Tensor]:
    return aggregation_weights(
        [sequence.mask for sequence in step],
        mode,
        norm=NORM,
        prompt_ids=[sequence.prompt for sequence in step],
        **options,
    )


# ---- splits ----


def random_microbatches(n: int, split: random.Random) -> Iterator[list[list[int]]]:
    """The numbers below n in random order, dealt to rows of microbatches of 1 to 4 ranks.

    Ranks have 1 to 12 microbatches each, unequally many; some are empty, some have empty rows.
    """
    order = split.sample(range(n), n)
    ranks = [[[] for _ in range(split.randint(1, 12))] for _ in range(split.randint(1, 4))]
    for i in order:
        split.choice(split.choice(ranks)).append(i)
    for members in (microbatch for rank in ranks for microbatch in rank):
        rows: list[list[int]] = [[] for _ in range(split.randint(1, len(members) + 1))]
        for i in members:
            split.choice(rows).append(i)
        yield rows


def pack(
    step: list[Sequence], weights: list[Tensor], rows: list[list[int]], n_more: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [B, T, F], labels and weights [B, T] of rows of sequences, padded at the end."""
    length = n_more + max(sum(len(step[i].labels) for i in row) for row in rows)

    def padded(parts: list[Tensor], empty: Tensor, value: float) -> Tensor:
        joined = torch.cat([empty, *parts])
        more = joined.new_full((length - len(joined), *joined.shape[1:]), value)
        return torch.cat((joined, more))

    features, labels, row_weights = [], [], []
    for row in rows:
        features.append(padded([step[i].features for i in row], step[0].features[:0], 7.0))
        labels.append(padded([step[i].labels for i in row], step[0].labels[:0], IGNORE_INDEX))
        row_weights.append(padded([weights[i] for i in row], weights[0][:0], 0.0))
    return torch.stack(features), torch.stack(labels), torch.stack(row_weights)


def accumulated(
    step: list[Sequence], weights: list[Tensor], theta: Tensor, split: random.Random
) -> tuple[float, Tensor]:
    """Loss and gradient with respect to theta [F, V] of one random split."""
    theta = theta.detach().requires_grad_()
    total = 0.0
    for rows in random_microbatches(len(step), split):
        features, labels, row_weights = pack(step, weights, rows, split.randint(0, 3))
        loss = weighted_cross_entropy(features @ theta, labels, {"loss_weights": row_weights})
        loss.backward()
        total += loss.item()
    return total, theta.grad


# ---- the reference: the text of each aggregation, sequence by sequence ----


def aggregated_loss(step: list[Sequence], mode: str, theta: Tensor) -> Tensor:
    sums = []
    for sequence in step:
        losses = F.cross_entropy(sequence.features @ theta, sequence.labels, reduction="none")
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


def largest_differences(mode: str, dtype: torch.dtype, num_splits: int) -> tuple[float, float]:
    """Largest relative difference of (loss, gradient) of random splits to the text of the mode."""
    step, theta = random_step(dtype), random_theta(dtype)
    expected_theta = theta.double().requires_grad_()
    expected = aggregated_loss(random_step(torch.float64), mode, expected_theta)
    expected.backward()
    gradient = expected_theta.grad
    weights = weights_of_step(step, mode, dtype=dtype)
    worst_loss = worst_gradient = 0.0
    for seed in range(num_splits):
        loss, grad = accumulated(step, weights, theta, random.Random(seed))
        worst_loss = max(worst_loss, abs(loss / expected.item() - 1))
        difference = (grad.double() - gradient).abs().max() / gradient.abs().max()
        worst_gradient = max(worst_gradient, difference.item())
    return worst_loss, worst_gradient
