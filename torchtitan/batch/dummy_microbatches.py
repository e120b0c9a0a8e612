"""Dummy microbatches, which a rank runs while other data-parallel ranks still have microbatches.

Forward and backward communicate between these ranks, so every rank has to run the same number of
microbatches. A dummy goes through the model like any microbatch, with a loss of 0 and no counted tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.dtensor import local_tensor, whole_tensor
from torchtitan.tools import torch_parts
from torchtitan.tools.host_copy import read_later

# Attention kernels on accelerators work on blocks of 128 tokens.
_MAX_LENGTH = 128


def num_dummies(
    n: int, group: torch.distributed.ProcessGroup | None, device: torch.device
) -> Callable[[], int]:
    """Return a function that returns how many dummies this rank needs.

    n: this rank's number of microbatches. group: the ranks that need equal numbers (collective), or
    None for no dummies. The returned function waits until the device has done the all-reduce:
    queue the rank's own microbatches before calling it, so that the device stays busy.
    """
    if group is None:
        return lambda: 0
    most = torch.full((1,), n, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    answer = read_later(most)
    return lambda: answer()[0] - n


def dummy_batch(seq_len: int, separates_documents: bool) -> TokenBatch:
    """Return a batch of one short row of at most `seq_len` tokens, all labels ignored."""
    tokens = torch.zeros(1, min(seq_len, _MAX_LENGTH), dtype=torch.int64)
    ids = torch.zeros_like(tokens, dtype=torch.int32) if separates_documents else None
    return TokenBatch(tokens, torch.full_like(tokens, IGNORE_INDEX), ids)


def zero_loss(outputs: Any) -> Tensor:
    """Return a loss of 0 that depends on every output, so that backward runs through the whole model."""
    # Multiply by 0 before the sum: bf16 logits may add up to inf, and 0 * inf is nan.
    zeros = [
        (whole_tensor(x) * 0).sum()
        for x in torch_parts.pytree.tree_leaves(outputs)
        if isinstance(x, Tensor)
    ]
    return sum(zeros[1:], zeros[0])


def forget_counts(model_parts: Sequence[nn.Module], where: Tensor | None = None) -> None:
    """Set the experts' token counts to 0. where: a bool tensor on the same device; False keeps the counts."""
    for counter in map(local_tensor, token_counters(model_parts)):
        counter.zero_() if where is None else counter.masked_fill_(where, 0)


def token_counters(model_parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return the live buffers in which mixtures of experts count the tokens of each expert."""
    return [
        buffer
        for part in model_parts
        for name, buffer in part.named_buffers()
        if name.rpartition(".")[2] == "tokens_per_expert"
    ]


@contextmanager
def without_counting(model_parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the experts' token counts at the end to their values at the beginning."""
    counters = token_counters(model_parts)
    before = [counter.clone() for counter in counters]
    try:
        yield
    finally:
        with torch.no_grad():
            for counter, count in zip(counters, before, strict=True):
                counter.copy_(count)
