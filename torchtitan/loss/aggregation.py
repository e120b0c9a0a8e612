"""Means over tokens, sequences or prompts as weighted sums over tokens, so that the loss is the same for
any split into ranks, microbatches, rows and pipeline stages.

B sequences, T tokens, V vocabulary entries.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.processes.ranks import all_ranks


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of weights * values (of one shape) in fp32 or wider, a scalar.

    Values with weight 0 may be infinite or NaN: they add nothing and get no gradient.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    return (values.to(dtype).masked_fill(weights == 0, 0) * weights).sum()


def weighted_cross_entropy(pred: Any, labels: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return the sum over tokens of `batch["loss_weights"]` [B, T] * cross entropy, a scalar.

    A `loss_fn` for `TrainingEngine.forward_backward_step`, with or without a head.
    pred: plain logits [B, T, V], or `TokenOutputs`. labels: [B, T]; IGNORE_INDEX is left out.
    Raises ValueError if the batch has no weights.
    """
    weights = batch.get("loss_weights")
    if weights is None:
        raise ValueError(
            f"weighted_cross_entropy needs 'loss_weights' [B, T] in the batch, got "
            f"{sorted(batch)}; compute them with aggregation_weights"
        )
    if not isinstance(pred, torch.Tensor):
        return -weighted_sum(pred.logprobs, weights)
    dtype = torch.promote_types(pred.dtype, torch.float32)
    losses = F.cross_entropy(
        pred.flatten(0, 1).to(dtype),
        labels.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return weighted_sum(losses.view(labels.shape), weights)


# ---- the weights ----

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
LOSS_AGGREGATIONS = get_args(LossAggregation)


def aggregation_weights(
    masks: Sequence[torch.Tensor],
    mode: str,
    *,
    norm: float | None = None,
    prompt_ids: Sequence[Hashable] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    normalize: bool = True,
    count_empty: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor] | tuple[list[torch.Tensor], float]:
    """Return a weight for every token; the loss is the sum of weight * loss per token.

    With m[i, t] the mask, n_i its sum, N the sum of all n_i, l the loss per token, and S and G the
    numbers of sequences and prompts with a token in the loss (with `count_empty`, all):

        token-mean               sum m l / N
        token-sum                sum m l
        seq-mean-token-sum       sum m l / S
        seq-mean-token-mean      sum (m l / n_i) / S
        seq-mean-token-sum-norm  sum m l / (S * norm)      (Liu et al. 2025, arXiv:2503.20783)
        prompt-mean              sum over prompts (sum m l / sum n_i, over its sequences) / G

    masks: a mask [T_i] for each of this rank's sequences in the optimizer step, nonzero for tokens in the
        loss. The weights have the same shapes and devices.
    norm: for seq-mean-token-sum-norm, a length that is the same in every step.
    prompt_ids: for prompt-mean, the id of each sequence's prompt, the same on every rank.
    group: the ranks that hold the step's other sequences; counts are summed over it (collective).
    normalize: set it to False if other calls add sequences to the step. Then the weights are not divided by N,
        S, S * norm or G, and the result is (weights, share). share is this rank's part of the divisor, or 0 for
        token-sum; pass the sum of all calls' shares to `TrainingEngine.optim_step(denominator=...)`. All
        sequences of a prompt must be in one call.
    count_empty: S and G include sequences and prompts without a token in the loss, as in verl.

    Raises ValueError for an unknown mode, or if the mode's norm or prompt_ids are missing.
    """
    if mode not in LOSS_AGGREGATIONS:
        raise ValueError(
            f"the loss aggregation must be one of {', '.join(LOSS_AGGREGATIONS)}, got {mode!r}"
        )
    if mode == "seq-mean-token-sum-norm" and not (norm is not None and norm > 0):
        raise ValueError(
            f"seq-mean-token-sum-norm divides by norm, which must be above 0, got {norm}; give a "
            "constant, such as the largest response length of the run"
        )
    if mode == "prompt-mean" and (prompt_ids is None or len(prompt_ids) != len(masks)):
        given = "none" if prompt_ids is None else len(prompt_ids)
        raise ValueError(
            f"prompt-mean needs prompt_ids, one for each of {len(masks)} sequences, got {given}"
        )
    if prompt_ids is not None:  # convert tensors, because dicts compare them by identity
        prompt_ids = [p.item() if isinstance(p, torch.Tensor) else p for p in prompt_ids]
    masks = [mask != 0 for mask in masks]
    counts = torch.stack([mask.sum() for mask in masks]).tolist() if masks else []
    if mode == "token-sum":
        share = 0
    elif mode == "token-mean":
        share = sum(counts)
    elif mode == "prompt-mean":
        tokens_of_prompt, share = _count_prompts(prompt_ids, counts, group, count_empty)
        counts = [tokens_of_prompt[prompt] for prompt in prompt_ids]
    else:
        share = len(counts) if count_empty else sum(n > 0 for n in counts)
    if mode == "seq-mean-token-sum-norm":
        share *= norm
    total = sum(_of_all_ranks(share, group)) if normalize else 1

    divides_sequences = mode in ("seq-mean-token-mean", "prompt-mean")
    weights = []
    for mask, n in zip(masks, counts, strict=True):
        # Multiply integers and divide once, so that every split of the step gives the same bits.
        denominator = (n if divides_sequences else 1) * total
        weights.append(mask.to(dtype) / (denominator or 1))
    return weights if normalize else (weights, float(share))


def _count_prompts(
    prompt_ids: Sequence[Hashable],
    counts: Sequence[int],
    group: dist.ProcessGroup | None,
    count_empty: bool,
) -> tuple[Counter[Hashable], int]:
    """Return each prompt's number of tokens in the step, and the number of prompts that this rank counts.

    Each prompt is counted by the lowest rank that has it.
    """
    own: Counter[Hashable] = Counter()
    for prompt, n in zip(prompt_ids, counts, strict=True):
        own[prompt] += n
    whole: Counter[Hashable] = Counter()
    own_rank = 0 if group is None else dist.get_rank(group)
    share = 0
    counted = own if count_empty else +own  # unary + drops prompts without a token
    for rank, tokens_of_prompt in enumerate(_of_all_ranks(counted, group)):
        if rank == own_rank:
            share = sum(prompt not in whole for prompt in tokens_of_prompt)
        whole.update(tokens_of_prompt)
    return whole, share


def _of_all_ranks(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    return [value] if group is None else all_ranks(value, group)
