"""Direct preference optimization on pairs of a chosen and a rejected answer.

B rows, T tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.loss.logprobs import TokenOutputs

METRICS = {"margin": "sum", "accuracy": "sum"}
"""The reductions of the metrics of `dpo`, for `forward_backward_step(metrics=...)`."""


def dpo(
    outputs: TokenOutputs,
    labels: Tensor,
    batch: Mapping[str, Any],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss summed over the pairs of a microbatch, and its metrics.

    With r(y) the sum over an answer's tokens of log p(token) - log p_ref(token), e the label
    smoothing, and d = beta * (r(chosen) - r(rejected)):

        loss = -(1 - e) log sigmoid(d) - e log sigmoid(-d)

    Rafailov et al. 2023, arXiv:2305.18290, equation 7; smoothed as in Mitchell 2023. With
    `length_normalized`, r is the mean over the answer's tokens (Lambert et al. 2024, arXiv:2411.15124,
    section 5.1.2), and beta is larger, about 5.

    A `loss_fn` for `TrainingEngine.forward_backward_step` with `head=TokenLogProbs()`,
    `metrics=METRICS` and, under context parallelism, `whole_rows=True`. The engine divides by
    `global_valid_tokens`: give the number of pairs in all microbatches of all data-parallel ranks.

    The batch has
        pair_ids [B, T] int64: k for labels of pair k's chosen answer, -k for labels of its rejected answer,
            0 elsewhere, as in the prompt. Pairs are numbered from 1 in each microbatch.
        ref_logprobs [B, T] fp32: the log-probabilities of the reference model.
    The two answers of a pair may be two rows, or two documents of one row.

    metrics: the margin d and the accuracy, which is 1 where d > 0, summed over pairs.
    Raises ValueError for a missing entry, for settings out of range and for a pair with only one
    answer; on an accelerator such a pair makes the loss NaN.
    """
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"dpo needs beta > 0 and 0 <= label_smoothing < 0.5, got {beta} and {label_smoothing}"
        )
    missing = [name for name in ("pair_ids", "ref_logprobs") if name not in batch]
    if missing:
        raise ValueError(
            f"dpo needs {' and '.join(missing)} [B, T] in the batch, got {sorted(batch)}"
        )
    pair_ids = batch["pair_ids"].flatten()
    log_ratios = (outputs.logprobs.float() - batch["ref_logprobs"]).flatten()
    # Sized for the largest possible number of pairs: reading the actual number would wait for the device.
    of_pairs = log_ratios.new_zeros(pair_ids.numel() // 2 + 1)
    sums, counts = [], []
    for is_answer in (pair_ids > 0, pair_ids < 0):
        index = pair_ids.abs().where(is_answer, 0)
        sums.append(of_pairs.scatter_add(0, index, log_ratios.masked_fill(~is_answer, 0)))
        counts.append(of_pairs.scatter_add(0, index, is_answer.float()))
    rewards, counts = torch.stack(sums), torch.stack(counts)
    is_pair = (counts > 0).any(0)
    is_torn = is_pair & (counts == 0).any(0)
    if is_torn.device.type == "cpu" and is_torn.any():
        torn = is_torn.nonzero().flatten().tolist()
        raise ValueError(
            f"dpo got only one of the two answers of pairs {torn} in a microbatch; keep the answers "
            "of a pair in one microbatch"
        )
    if length_normalized:
        rewards = rewards / counts.clamp(min=1)
    margin = beta * (rewards[0] - rewards[1])
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    loss = loss.masked_fill(~is_pair, 0).masked_fill(is_torn, torch.nan).sum()
    accuracy = ((margin > 0) & is_pair).float().sum()
    return loss, {"margin": margin.detach().sum(), "accuracy": accuracy}
