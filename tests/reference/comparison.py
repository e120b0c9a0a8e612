"""Compares a model family with Hugging Face's on the same weights, tokens and steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan.models.decoder import Decoder

VOCAB = 96
# Two rows with different document boundaries, so with different positions.
DOCUMENT_LENGTHS = [[7, 1, 20, 12], [30, 10]]


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def perturb_norms_and_biases(model: nn.Module) -> None:
    """Move weights away from ones and zeros, which would hide a mistake."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "bias" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))


def load_into(
    model: Decoder, adapter: Any, weights: dict[str, Tensor], lacking: Sequence[str] = ()
) -> tuple[Decoder, Any]:
    """Copy both, the model with these weights: all of its own except those named `lacking`."""
    ours = adapter.from_hf({name: tensor.clone() for name, tensor in weights.items()})
    missing, unexpected = model.load_state_dict(ours, strict=False)
    assert not unexpected
    assert sorted(missing) == sorted(lacking)
    return model, adapter


def logits_of(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] of our or HF's model; positions: [B, T] of packed documents, only for ours."""
    if not isinstance(model, Decoder):
        return model(tokens).logits
    masks = None
    if model.model_args.attn_type != "sdpa":
        extra = None if positions is None else {"positions": positions}
        masks = model.get_attention_masks(tokens, None, extra)
    return model(tokens, attention_masks=masks, positions=positions)


def check_packed_equals_separate(reference: nn.Module, model: Decoder, tolerance: float) -> None:
    """Our log-probabilities of packed documents equal those of `reference` for each document alone."""
    tokens = random_tokens(2, 40)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENT_LENGTHS])
    with torch.no_grad():
        ours = logits_of(model, tokens, positions)
        theirs = [
            torch.cat([logits_of(reference, part) for part in row[None].split(sizes, dim=1)], dim=1)
            for row, sizes in zip(tokens, DOCUMENT_LENGTHS, strict=True)
        ]
    difference = ours.log_softmax(-1) - torch.cat(theirs).log_softmax(-1)
    assert difference.abs().max() <= tolerance


def check_three_adamw_steps(
    reference: nn.Module, model: Decoder, lr: float = 1e-2
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses agree over three steps on one batch; returns (their, our) first gradients."""
    batch = random_tokens(2, 33)
    losses, first_gradients = [], []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=lr)
        for step in range(3):
            logits = logits_of(one, batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            if step == 0:
                first_gradients.append({name: p.grad for name, p in one.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    # AdamW's first steps are of full size whatever the gradient: rounding errors grow with them.
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)
    theirs, ours = first_gradients
    return theirs, ours
