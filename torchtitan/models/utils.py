"""Sizes of a model: parameters and floating-point operations per token."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn

from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.protocols.model import BaseModelArgs


def get_dense_model_nparams_and_flops(
    model_args: "BaseModelArgs", model: nn.Module, head_dims: int, seq_len: int
) -> tuple[int, int]:
    """Return (parameters, FLOPs of forward and backward per token) of a dense transformer.

    Counted as in the PaLM paper (Chowdhery et al. 2022, appendix B): 6 per matmul parameter and
    token, plus attention over the whole row. The embedding lookup costs nothing. With tied
    embeddings the one table is left out of both numbers.

    head_dims: query head size + value head size.
    """
    n_params = sum(p.numel() for p in model.parameters())
    n_embedding = sum(
        p.numel()
        for child in model.children()
        if isinstance(child, nn.Embedding)
        for p in child.parameters()
    )
    flops = 6 * (n_params - n_embedding) + _attention_flops(model_args, head_dims, seq_len)
    return _reported_size(model_args, n_params, n_embedding), flops


def get_moe_model_nparams_and_flops(
    model_args: "BaseModelArgs", model: nn.Module, head_dims: int, seq_len: int
) -> tuple[int, int]:
    """Return (parameters, FLOPs per token); of the experts only the chosen ones cost FLOPs.

    Counted as `get_dense_model_nparams_and_flops` does otherwise.
    """
    n_params: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        n_params[_kind_of(name)] += parameter.numel()

    experts = n_params["moe.experts"]
    always_on = n_params["moe.router"] + n_params["moe.shared_experts"]
    active = always_on
    dense = n_params["dense"] + n_params["embedding"]
    if experts:
        active += experts * model_args.moe_args.top_k // model_args.moe_args.num_experts
        logger.info(
            "parameters: dense %s, sparse %s, active per token %s",
            f"{dense:,}",
            f"{always_on + experts:,}",
            f"{dense + active:,}",
        )
    flops = 6 * (n_params["dense"] + active) + _attention_flops(model_args, head_dims, seq_len)
    total = dense + always_on + experts
    return _reported_size(model_args, total, n_params["embedding"]), flops


def _kind_of(parameter_name: str) -> str:
    for kind in ("embedding", "moe.shared_experts", "moe.router", "moe.experts"):
        if kind in parameter_name:
            return kind
    return "dense"


def _attention_flops(model_args: Any, head_dims: int, seq_len: int) -> int:
    return 6 * model_args.n_layers * model_args.n_heads * head_dims * seq_len


def _reported_size(model_args: Any, n_params: int, n_embedding: int) -> int:
    return n_params - n_embedding if getattr(model_args, "enable_weight_tying", False) else n_params


def __getattr__(name: str) -> Any:
    # Kept importable from here under the names they used to have.
    if name == "trunc_normal_":
        from torchtitan.distributed.seeded_init import trunc_normal_

        return trunc_normal_
    if name == "MoEStateDictAdapter":
        from torchtitan.models.hf_adapter import KeyMapAdapter

        return KeyMapAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
