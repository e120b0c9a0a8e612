"""Sizes of a model: parameters and floating-point operations per token."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from typing import Any

from torch import nn

from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models.hf_adapter import KeyMapAdapter as MoEStateDictAdapter
from torchtitan.tools.logging import logger


def get_dense_model_nparams_and_flops(
    model_args: Any, model: nn.Module, head_dims: int, seq_len: int
) -> tuple[int, int]:
    """Return (parameters, FLOPs of forward and backward per token) of a dense transformer.

    Counted as in the PaLM paper (Chowdhery et al. 2022, appendix B): 6 per matmul parameter and
    token, plus attention over the whole row. The embedding lookup costs nothing. An embedding tied to
    the output is counted in neither number.

    head_dims: query head size + value head size.
    """
    n_params = sum(p.numel() for p in model.parameters())
    tables = [child for child in model.children() if isinstance(child, nn.Embedding)]
    n_matmul = n_params - sum(table.weight.numel() for table in tables)
    attention = model_args.n_layers * model_args.n_heads * head_dims * seq_len
    is_tied = getattr(model_args, "enable_weight_tying", False)
    return n_matmul if is_tied else n_params, 6 * (n_matmul + attention)


def get_moe_model_nparams_and_flops(
    model_args: Any, model: nn.Module, head_dims: int, seq_len: int
) -> tuple[int, int]:
    """As `get_dense_model_nparams_and_flops`, but count FLOPs only for the experts that a token chooses."""
    n_params, flops = get_dense_model_nparams_and_flops(model_args, model, head_dims, seq_len)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".moe.experts." in name)
    if not experts:
        return n_params, flops
    idle = experts - experts * model_args.moe_args.top_k // model_args.moe_args.num_experts
    total = sum(sizes.values())
    sparse = sum(size for name, size in sizes.items() if ".moe." in name)
    logger.info(
        "parameters: dense %s, sparse %s, active per token %s",
        f"{total - sparse:,}",
        f"{sparse:,}",
        f"{total - idle:,}",
    )
    return n_params, flops - 6 * idle
