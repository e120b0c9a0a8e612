"""The loss on preference pairs: packing, and its errors. See also reference/test_dpo_trl.py."""

import math

import pytest
import torch

from torchtitan.loss.logprobs import TokenOutputs
from torchtitan.loss.preference import dpo

# Two pairs: the first in two rows, the second as two documents of one row.
PAIR_IDS = torch.tensor([[0, 1, 1, 0, 0, 0], [0, -1, 0, 0, 0, 0], [0, 2, 0, -2, -2, -2]])


@pytest.mark.parametrize("length_normalized", [False, True])
def test_pairs_may_be_rows_or_documents_of_a_row(length_normalized):
    settings = {"beta": 2.0, "label_smoothing": 0.1, "length_normalized": length_normalized}
    torch.manual_seed(0)
    logprobs, reference = (-torch.rand(PAIR_IDS.shape) for _ in range(2))
    batch = {"pair_ids": PAIR_IDS, "ref_logprobs": reference}
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    loss, metrics = dpo(outputs, torch.zeros_like(PAIR_IDS), batch, **settings)
    ratios, expected, margins = logprobs - reference, 0.0, []
    for pair in (1, 2):
        chosen, rejected = ratios[pair == PAIR_IDS].tolist(), ratios[-pair == PAIR_IDS].tolist()
        sums = [sum(side) / (len(side) if length_normalized else 1) for side in (chosen, rejected)]
        margins.append(2.0 * (sums[0] - sums[1]))
        expected += 0.9 * math.log1p(math.exp(-margins[-1]))
        expected += 0.1 * math.log1p(math.exp(margins[-1]))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["margin"].item() == pytest.approx(sum(margins), rel=1e-5)
    assert metrics["accuracy"].item() == sum(margin > 0 for margin in margins)
