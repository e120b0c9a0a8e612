"""Loss functions that sum over tokens; the engine divides by the global token count.

B sequences, T tokens, V vocabulary entries.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.tools.logging import logger

LossFunction: TypeAlias = Callable[..., torch.Tensor]


def cross_entropy_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of every label that is not IGNORE_INDEX, a scalar.

    pred: [B, T, V] logits, within torch's `loss_parallel()` also a DTensor split along V;
    labels: [B, T] int64, plain. Computed in fp32: bf16 has too few digits for a sum over the
    vocabulary.
    """
    loss = F.cross_entropy(
        pred.flatten(0, 1).float(),
        labels.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return loss.to_local() if is_dtensor(loss) else loss


def mse_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed squared error in fp32, a scalar. No gradient flows to the labels."""
    return F.mse_loss(pred.float(), labels.float().detach(), reduction="sum")


def build_cross_entropy_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Return `cross_entropy_loss`, compiled if the config says so. Keywords are ignored."""
    return _maybe_compile(cross_entropy_loss, job_config)


def build_mse_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Return `mse_loss`, compiled if the config says so. Keywords are ignored."""
    return _maybe_compile(mse_loss, job_config)


def _maybe_compile(loss_fn: LossFunction, job_config: JobConfig) -> LossFunction:
    if not job_config.compile.applies_to("loss"):
        return loss_fn
    logger.info("Compiling the loss function with torch.compile")
    return torch.compile(loss_fn, backend=job_config.compile.backend)
