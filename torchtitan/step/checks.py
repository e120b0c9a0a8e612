"""What a caller gives to a step is checked before the model runs."""

import math

import torch

from torchtitan.batch.batch import Batch


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
