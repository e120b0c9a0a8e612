"""The norms of hidden states, and of the heads of queries and keys."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.distributed.collectives import Collective
from torchtitan.distributed.dtensor import is_dtensor, local_parameter
from torchtitan.models.args import DecoderArgs
from torchtitan.numerics.norm import RMSNorm


def build_norm(args: DecoderArgs) -> RMSNorm:
    """Return a norm of hidden states [..., M]."""
    return RMSNorm(args.dim, args.norm_eps, args.norm_kind)


def head_norm(args: DecoderArgs, n_heads: int, head_dim: int) -> RMSNorm:
    """Return a norm of each head [..., D] of queries or keys."""
    return RMSNorm(head_dim, args.norm_eps, args.norm_kind)


def whole_norm(args: DecoderArgs, n_heads: int, head_dim: int) -> "WholeNorm":
    """Return a norm of all heads of queries or keys at once, [..., heads * D]."""
    return WholeNorm(n_heads * head_dim, args.norm_eps, args.norm_kind)


class WholeNorm(RMSNorm):
    """An RMS norm of all heads of queries or keys at once, [..., heads * D].

    Under tensor parallelism each rank holds some heads; an all-reduce sums the squares of all heads.
    """

    spans_heads: ClassVar[bool] = True
    reads_local_parameters: ClassVar[bool] = True
    tensor_parallel_row: ClassVar[Mapping[str, int | None]] = {"weight": 0}

    def forward(self, x: Tensor) -> Tensor:
        weight = local_parameter(self.weight)
        if not is_dtensor(self.weight):
            return self.normalize(x, weight)
        numbers = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = numbers.square().sum(-1, keepdim=True)
        group = self.weight.device_mesh.get_group().group_name
        total = Collective.apply("sum", "sum", squares, group)
        numbers = numbers * (total / self.normalized_shape[0] + self.eps).rsqrt()
        if self.kind == "late":
            return numbers.to(x.dtype) * weight
        return (numbers * (weight + 1 if self.kind == "offset" else weight)).to(x.dtype)
