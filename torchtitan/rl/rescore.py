"""Log-probs of sampled tokens from the trainer's own forward, in place of a generator's."""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.components.logprobs import TokenLogProbs
from torchtitan.rl.types import TrainingBatch, TrainingMicrobatch

if TYPE_CHECKING:
    from torchtitan.engine import TrainingEngine


def rescore(
    engine: "TrainingEngine", batch: TrainingBatch, temperature: float = 1.0
) -> tuple[TrainingBatch, float]:
    """Return the batch with log-probs by the engine's weights, and how far the generator's were off.

    temperature: what the tokens were drawn with.

    The forward sees the very microbatches that are trained on: until the weights change, a
    training forward gives the same bits, and every ratio is exactly 1. Cached decoding adds up in
    another order and comes out 1e-6 off in fp32.

    Collective. Only this rank's microbatches change; under pipeline parallelism, only on the ranks
    with the last stage, where the loss is computed. The difference is the largest of this rank, 0
    where there is nothing to compare.
    """
    own = batch.of_rank(engine.dp_rank)
    logprobs = engine.forward_step(
        [microbatch.engine_batch() for microbatch in own],
        output_fn=lambda outputs, _: outputs.logprobs,
        head=TokenLogProbs(temperature),
    )
    if logprobs is None:
        return batch, 0.0
    rescored = [_with_logprobs(mb, found) for mb, found in zip(own, logprobs, strict=True)]
    differences = [
        (new.generator_logprobs - old.generator_logprobs)[old.loss_mask > 0]
        for new, old in zip(rescored, own, strict=True)
    ]
    largest = torch.cat([d.abs().flatten() for d in differences] or [torch.zeros(0)])
    rows = [list(row) for row in batch.microbatches]
    for row, microbatch in zip(rows, rescored, strict=True):
        row[engine.dp_rank] = microbatch
    replaced = dataclasses.replace(batch, microbatches=tuple(tuple(row) for row in rows))
    return replaced, largest.max().item() if largest.numel() else 0.0


def _with_logprobs(microbatch: TrainingMicrobatch, logprobs: Tensor) -> TrainingMicrobatch:
    old = microbatch.generator_logprobs
    new = logprobs.detach().to(old.device, old.dtype)
    return dataclasses.replace(
        microbatch, generator_logprobs=torch.where(microbatch.loss_mask > 0, new, 0.0)
    )
