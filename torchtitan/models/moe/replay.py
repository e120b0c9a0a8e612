"""Checks a generator's choice of experts, which replaces the router's choice in training."""

from typing import Any

import torch
from torch import Tensor

from torchtitan.tools.host_copy import on_host

_NAME = "the batch's 'routed_experts'"


def check_replay(tokens: Tensor, experts: Tensor, n_moe: int, n_layers: int, args: Any) -> None:
    """Raise ValueError if experts [B, T, L, k] don't fit tokens [B, T]. L must be n_moe or n_layers.

    n_moe: the number of MoE layers among the n_layers. args: their `MoEArgs`.
    """
    if not n_moe:
        raise ValueError(
            f"{_NAME} are for a mixture of experts, and this model is dense; leave them out"
        )
    shape, got = (*tokens.shape[:2], n_moe, args.top_k), tuple(experts.shape)
    if got not in (shape, (*shape[:2], n_layers, args.top_k)):
        layers = "" if n_moe == n_layers else f", or have an entry for all {n_layers} layers"
        raise ValueError(
            f"{_NAME} must be [rows, tokens, mixtures of experts, experts per token] = {shape}"
            f"{layers}, got {got}; take them from a generator with the same model and tokens"
        )
    if experts.dtype.is_floating_point or experts.dtype is torch.bool:
        raise ValueError(f"{_NAME} must be integers, got {experts.dtype}; give torch.int16")
    experts = on_host(experts)
    if experts.device.type != "cpu" or not experts.numel():
        return
    smallest, largest = (x.item() for x in experts.aminmax())
    if not -1 <= smallest <= largest < args.num_experts:
        raise ValueError(
            f"{_NAME} must be expert ids in [0, {args.num_experts}), or -1 where the router "
            f"chooses, got {smallest} to {largest}; take them from a generator with the same model"
        )
    in_order = experts.sort(dim=-1).values
    is_known = in_order[..., -1] >= 0
    is_wrong = (in_order.diff(dim=-1) == 0).any(dim=-1) | (in_order[..., 0] < 0)
    if (is_known & is_wrong).any():
        raise ValueError(
            f"{_NAME} must give each token {args.top_k} different experts, or -1 in all {args.top_k} places, "
            "got an expert twice or -1 in some places; give -1 in all places if the experts are unknown"
        )
