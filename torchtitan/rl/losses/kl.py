"""How far the policy has moved from a reference policy, estimated at the sampled tokens."""

import torch
from torch import Tensor


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, kl_type: str, max_log_ratio: float
) -> Tensor:
    """Return an estimate per token of KL(policy || reference), the shape of both arguments.

    With d = logprobs - ref_logprobs, clamped to plus and minus max_log_ratio (Schulman 2020,
    "Approximating KL divergence"):

        k1  d               unbiased; as a loss its gradient is 0 on average, so it only measures
        k2  d^2 / 2         biased; as a loss its gradient is that of KL(policy || reference)
        k3  exp(-d) - 1 + d unbiased, never negative; the one that GRPO uses

    What is said of gradients holds for tokens that the policy itself sampled.
    Raises ValueError for another type.
    """
    d = (logprobs - ref_logprobs).clamp(-max_log_ratio, max_log_ratio)
    if kl_type == "k1":
        return d
    if kl_type == "k2":
        return d**2 / 2
    if kl_type == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"rl.loss.kl_type must be one of 'k1', 'k2', 'k3', got {kl_type!r}")
