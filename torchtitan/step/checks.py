"""What a caller gives to a step is checked before the model runs: [B, T] rows, one denominator."""

import math

import torch

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.step.runner import Batch


def check_shapes(batch: Batch, labels: torch.Tensor | None) -> None:
    tokens = batch.get("input")
    if not isinstance(tokens, torch.Tensor):
        raise ValueError(
            f"a microbatch needs 'input', a tensor of token ids [B, T], got {type(tokens).__name__} "
            f"there and the keys {sorted(batch)}; put the tokens under 'input'"
        )
    if tokens.dim() < 2:
        raise ValueError(
            f"a microbatch's 'input' must be rows of token ids [B, T], got shape "
            f"{tuple(tokens.shape)}; give a single row as input[None]"
        )
    if labels is not None and labels.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"labels must have the shape of 'input' [B, T], got {tuple(labels.shape)} for "
            f"{tuple(tokens.shape)}; give each token its target, {IGNORE_INDEX} where it has none"
        )


def check_denominator(global_valid_tokens: torch.Tensor | float) -> None:
    """One on an accelerator is not looked at, which would wait for it."""
    if isinstance(global_valid_tokens, torch.Tensor) and global_valid_tokens.device.type != "cpu":
        return
    if not 0 < float(global_valid_tokens) < math.inf:
        raise ValueError(
            f"global_valid_tokens must be above 0 and finite, got {float(global_valid_tokens)}; it "
            "divides the loss: give max(count, 1) for a step that may have no valid token"
        )


def labels_of(batch: Batch) -> torch.Tensor:
    if batch.get("labels") is None:
        raise ValueError(
            f"forward_step with a head needs the batch's 'labels' [B, T], got {sorted(batch)}; put "
            "the token ids there whose log-probs are wanted, IGNORE_INDEX where none is"
        )
    return batch["labels"]
