"""Losses and gradients that do not depend on how a step is split into ranks and microbatches.

With m the labels in the loss, n_i their number in sequence (row) i, l the loss per token, S the number
of sequences with n_i > 0 and L training.seq_len, training.loss_aggregation is one of

    token-mean               sum m l / sum n_i        (0.2.2's)
    seq-mean-token-mean      sum (m l / n_i) / S
    seq-mean-token-sum       sum m l / S
    seq-mean-token-sum-norm  sum m l / (S * L)        (Liu et al. 2025, arXiv:2503.20783)

Sums and counts run over all rows of all ranks and microbatches of an optimizer step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import JobConfig

IGNORE_INDEX = -100  # of torchtitan.components.loss, which imports this module
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregated(loss_fn: Callable[..., Tensor], job_config: JobConfig) -> Callable[..., Tensor]:
    """Return the loss function whose sum over microbatches, / the denominator, is the step's loss.

    loss_fn: (pred [B, T, V], labels [B, T]) -> the sum over tokens.
    Raises ValueError for an unknown mode, and for one that a layout cannot compute.
    """
    mode = job_config.training.loss_aggregation
    if mode not in MODES:
        raise ValueError(f"training.loss_aggregation must be one of {MODES}, got {mode!r}")
    if mode == "token-mean":
        return loss_fn
    if job_config.validation.enable:
        raise ValueError(
            f"validation counts tokens, and training.loss_aggregation = {mode!r} counts sequences; "
            'set validation.enable = false or training.loss_aggregation = "token-mean"'
        )
    if mode != "seq-mean-token-mean":
        return loss_fn
    if job_config.parallelism.context_parallel_degree > 1:
        raise ValueError(
            "training.loss_aggregation = 'seq-mean-token-mean' needs whole sequences on a rank, got "
            "parallelism.context_parallel_degree > 1; use 'seq-mean-token-sum-norm'"
        )

    def sum_of_means(pred: Tensor, labels: Tensor) -> Tensor:
        counts = (labels != IGNORE_INDEX).sum(dim=1).clamp(min=1)
        rows = [loss_fn(pred[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
        return (torch.stack(rows) / counts).sum()

    return sum_of_means


def denominator(labels: Tensor, job_config: JobConfig) -> Tensor:
    """Return a microbatch's share of the step's denominator, int64; labels are [B, T]."""
    mode, valid = job_config.training.loss_aggregation, labels != IGNORE_INDEX
    if mode == "token-mean":
        return valid.sum()
    if labels.dim() != 2:
        raise ValueError(f"training.loss_aggregation = {mode!r} needs labels [B, T] of tokens")
    sequences = valid.any(dim=1).sum()
    return sequences * (job_config.training.seq_len if mode == "seq-mean-token-sum-norm" else 1)


def finish_gradients(trainer: Any, denominator: Tensor | float) -> None:
    """Make gradients those of the loss, whatever the layout; call it before clipping.

    0.2.2's pipelines give the gradient of the sum, so it is divided by the step's denominator. Its plain
    replicas (DDP) average, and FSDP's ranks add, so the average is multiplied by the replicas.
    """
    dims = trainer.parallel_dims
    averages = dims.dp_replicate_enabled and not dims.fsdp_enabled
    if averages or dims.pp_enabled:
        factor = (dims.dp_replicate if averages else 1) / (denominator if dims.pp_enabled else 1)
        for parameter in (p for part in trainer.model_parts for p in part.parameters()):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
