"""Sizes of a model: parameters and floating-point operations per token."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from typing import Any

from torch import nn

from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models.hf_adapter import KeyMapAdapter as MoEStateDictAdapter
from torchtitan.numerics.nf4 import num_numbers
from torchtitan.tools.logging import logger


def get_moe_model_nparams_and_flops(
    model_args: Any,
    model: nn.Module,
    head_dims: int,
    seq_len: int,
    attention: int | None = None,
) -> tuple[int, int]:
    """Return (parameters, FLOPs of forward and backward per token) of a transformer.

    FLOPs are counted as in the PaLM paper (Chowdhery et al. 2022, appendix B): 6 per matmul parameter
    and token, without the experts that a token does not choose, plus attention over the whole row. The
    embedding lookup costs nothing. A tied embedding is left out of both results.
    head_dims: query head size + value head size. attention: multiplications of attention in a forward per
        token; None: n_heads * head_dims * seq_len in each layer.
    """
    sizes = {name: num_numbers(parameter) for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    tables = [child for child in model.children() if isinstance(child, nn.Embedding)]
    n_matmul = total - sum(table.weight.numel() for table in tables)
    if attention is None:
        attention = model_args.n_layers * model_args.n_heads * head_dims * seq_len
    idle = 0
    if experts := sum(size for name, size in sizes.items() if ".moe.experts." in name):
        idle = experts - experts * model_args.moe_args.top_k // model_args.moe_args.num_experts
        sparse = sum(size for name, size in sizes.items() if ".moe." in name)
        logger.info(
            "parameters: dense %s, sparse %s, active per token %s",
            f"{total - sparse:,}",
            f"{sparse:,}",
            f"{total - idle:,}",
        )
    is_tied = getattr(model_args, "enable_weight_tying", False)
    return n_matmul if is_tied else total, 6 * (n_matmul + attention - idle)


get_dense_model_nparams_and_flops = get_moe_model_nparams_and_flops
