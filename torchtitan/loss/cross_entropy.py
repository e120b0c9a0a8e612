"""Loss functions that sum over tokens; the engine divides by the global token count.

B sequences, T tokens, V vocabulary entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.loss.chunked_logits import (
    Call,
    ChunkedHead,
    Operands,
    SummedLoss,
    cross_entropy_of,
)
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import keywords_of

LossFunction: TypeAlias = Callable[..., torch.Tensor]

# From this size on, chunks save memory and cost no time. With 4,096 entries and tokens, and model dim 256,
# they take 33 MiB instead of 196 MiB, and 0.71 of the CPU time. With smaller vocabularies, logits take less
# memory than saved activations.
_LARGE_VOCABULARY = 4096


def cross_entropy_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of every label that is not IGNORE_INDEX, a scalar.

    pred: [B, T, V] logits, within torch's `loss_parallel()` also a DTensor split along V; labels:
    [B, T] int64, plain. Computed in fp32: bf16 has too few digits for a sum over the vocabulary.
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


build_cross_entropy_loss.has_token_loss = True  # see `TrainSpec.has_token_loss`


@dataclass(frozen=True)
class SummedCrossEntropy(ChunkedHead[Tensor]):
    """A head: sums the cross entropy of all labels but IGNORE_INDEX, to an fp32 scalar.

    Raises ValueError if chunk_tokens is not positive.
    """

    chunk_tokens: int | None = None
    compile_backend: str | None = None

    def compute(self, operands: Operands, call: Call, labels: Tensor) -> Tensor:
        loss_of = cross_entropy_of(labels.flatten(), self, call)
        return SummedLoss.apply(*operands, 1, loss_of, self, call)[0]


def default_head(
    loss_fn: LossFunction, model_parts: Sequence[nn.Module], job_config: JobConfig
) -> SummedCrossEntropy | None:
    """Return a head that computes `loss_fn` inside the output projection, or None.

    Returns None for a loss other than `cross_entropy_loss`, on pipeline ranks without the output,
    for models whose output takes no head, for training.loss_chunk = 0, and for a small vocabulary
    with training.loss_chunk = -1.
    """
    chunk_tokens = job_config.training.loss_chunk
    last = model_parts[-1]
    output = getattr(last, "output", None)
    loss_fn = torch_parts.field_of(loss_fn, "compiled_function") or loss_fn
    if loss_fn is not cross_entropy_loss or output is None or chunk_tokens == 0:
        return None
    if not all("head" in keywords_of(module.forward)[0] for module in (last, output)):
        return None
    if chunk_tokens == -1 and output.weight.shape[0] < _LARGE_VOCABULARY:
        return None
    backend = job_config.compile.backend_of("loss")
    return SummedCrossEntropy(None if chunk_tokens == -1 else chunk_tokens, backend)


def build_mse_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Return `mse_loss`, compiled if the config says so. Keywords are ignored."""
    return _maybe_compile(mse_loss, job_config)


def _maybe_compile(loss_fn: LossFunction, job_config: JobConfig) -> LossFunction:
    if not job_config.compile.applies_to("loss"):
        return loss_fn
    logger.debug("Compiling the loss function with torch.compile")
    return torch.compile(loss_fn, backend=job_config.compile.backend)
