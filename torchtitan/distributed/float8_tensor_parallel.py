"""float8 linear layers that are split over the ranks of a tensor-parallel mesh.

Layers with one scale per tensor use the scale of the whole tensor: an all-reduce over the ranks that
hold parts finds the largest magnitude. If all linear layers of a block have one scale per tensor, the
block gathers hidden states and gradients in float8. Layers with one scale per row compute the scales of
this rank's part, and their hidden states are gathered in high precision.

B rows, T tokens, t = T / tp tokens on this rank, K inputs and N outputs of this rank's part.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torchao.float8.config import Float8LinearConfig, ScalingGranularity
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from torchtitan.distributed.collectives import OPS, all_gather, reduce_scatter
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.sequence_parallel import SequenceShards


def has_one_scale_per_tensor(linear: Float8Linear) -> bool:
    casts = linear.config
    return all(
        cast.scaling_granularity == ScalingGranularity.TENSORWISE
        for cast in (
            casts.cast_config_input,
            casts.cast_config_weight,
            casts.cast_config_grad_output,
        )
    )


class LocalFloat8Linear(Float8Linear):
    """A Float8Linear that computes with this rank's part of its parameters, as `LocalLinear` does."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K], in high precision or float8. Returns [..., N]."""
        mesh, (placement,) = self.weight.device_mesh, self.weight.placements
        weight = local_parameter(self.weight)
        if has_one_scale_per_tensor(self):
            split_dim = placement.dim if isinstance(placement, Shard) else None
            group = mesh.get_group().group_name
            out = _TensorwiseLinear.apply(
                x, weight, split_dim, group, self.linear_mm_config, self.config
            )
        else:
            out = matmul_with_hp_or_float8_args.apply(
                x, weight.t(), self.linear_mm_config, self.config
            )
        if self.bias is None:
            return out
        return out + local_parameter(self.bias, added_once=placement == Shard(1)).to(out.dtype)


def to_float8(
    x: Tensor,
    role: GemmInputRole,
    group: str | None,
    mm_config: LinearMMConfig,
    config: Float8LinearConfig,
) -> Tensor:
    """Return `x` in float8, with one scale for the parts on all ranks of `group` (None: this rank)."""
    if isinstance(x, Float8TrainingTensor):
        return x
    cast = {
        GemmInputRole.INPUT: config.cast_config_input,
        GemmInputRole.WEIGHT: config.cast_config_weight,
        GemmInputRole.GRAD_OUTPUT: config.cast_config_grad_output,
    }[role]
    largest = x.abs().max()
    if group is not None:
        largest = OPS.wait_tensor(OPS.all_reduce(largest, "max", group))
    scale = amax_to_scale(largest, cast.target_dtype, config.round_scales_to_power_of_2)
    return hp_tensor_and_scale_to_float8(x, scale, cast.target_dtype, mm_config, role)


# allow_in_graph: dynamo does not trace these autograd functions, so it never meets float8 tensor subclasses.


@torch.compiler.allow_in_graph
class _TensorwiseLinear(torch.autograd.Function):
    """Multiply x [..., K] by this rank's part [N, K] of a weight, transposed.

    split_dim: how ranks split the weight. 0: each rank computes some of the outputs; 1: each rank
        sums over some of the inputs; None: every rank has the whole weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        split_dim: int | None,
        group: str,
        mm_config: LinearMMConfig,
        config: Float8LinearConfig,
    ) -> Tensor:
        ctx.split_dim, ctx.group, ctx.configs = split_dim, group, (mm_config, config)
        x = to_float8(x, GemmInputRole.INPUT, group if split_dim == 1 else None, *ctx.configs)
        weight = to_float8(
            weight, GemmInputRole.WEIGHT, group if split_dim is not None else None, *ctx.configs
        )
        ctx.save_for_backward(x, weight)
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t())
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad = to_float8(
            grad.contiguous(),
            GemmInputRole.GRAD_OUTPUT,
            ctx.group if ctx.split_dim == 0 else None,
            *ctx.configs,
        )
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = torch.mm(rows, weight).reshape(x.shape)
        grad_weight = None
        # A frozen weight needs no gradient.
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
        return grad_x, grad_weight, None, None, None, None


class Float8SequenceShards(SequenceShards):
    """`SequenceShards` that gathers in float8, with the settings of `linear` (any layer of the block)."""

    def __init__(self, mesh: DeviceMesh, linear: Float8Linear):
        super().__init__(mesh, overlap=True)
        self._configs = linear.linear_mm_config, linear.config

    def gather(self, shard: Tensor, seq_len: int) -> Tensor:
        """[B, t, M] -> [B, T, M] in float8."""
        return _Float8Gather.apply(shard, seq_len, self._ranks, *self._configs)

    def reduce(self, partial_sum: Tensor) -> Tensor:
        """Sum [B, T, M] over ranks -> this rank's [B, t, M]; backward gathers gradients in float8."""
        return _Float8Reduce.apply(partial_sum, self._ranks, *self._configs)


def _gather_in_float8(
    shard: Tensor, role: GemmInputRole, seq_len: int, ranks: tuple, configs: tuple
) -> Tensor:
    shard = to_float8(shard, role, ranks[0], *configs)
    if shard.device.type != "cpu":
        return all_gather(shard, 1, seq_len, *ranks)
    # gloo has no float8, so the values are sent as bytes.
    data = all_gather(shard._data.view(torch.uint8), 1, seq_len, *ranks).view(shard._data.dtype)
    return Float8TrainingTensor(data, shard._scale, shard._orig_dtype, configs[0], role)


@torch.compiler.allow_in_graph
class _Float8Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, seq_len: int, ranks: tuple, *configs: Any) -> Tensor:
        ctx.ranks = ranks
        return _gather_in_float8(shard, GemmInputRole.INPUT, seq_len, ranks, configs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad_shard = reduce_scatter(grad, 1, grad.shape[1], *ctx.ranks)
        return grad_shard, None, None, None, None


@torch.compiler.allow_in_graph
class _Float8Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_sum: Tensor, ranks: tuple, *configs: Any) -> Tensor:
        ctx.seq_len, ctx.ranks, ctx.configs = partial_sum.shape[1], ranks, configs
        return reduce_scatter(partial_sum, 1, ctx.seq_len, *ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        whole = _gather_in_float8(
            grad, GemmInputRole.GRAD_OUTPUT, ctx.seq_len, ctx.ranks, ctx.configs
        )
        return whole, None, None, None


# The linear layers of a block whose input is gathered, and the layers whose result is reduced.
_READ = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
_REDUCED = ("attention.wo", "feed_forward.w2")


def float8_shards_for(block: nn.Module, mesh: DeviceMesh) -> Float8SequenceShards | None:
    """Return shards that gather the block's hidden states in float8; None if a layer needs high precision."""
    modules = dict(block.named_modules())
    linears = [modules.get(name) for name in _READ + _REDUCED]
    fits = all(isinstance(x, Float8Linear) and has_one_scale_per_tensor(x) for x in linears)
    # No biases, because their gradients would be summed in float8.
    if not fits or any(modules[name].bias is not None for name in _REDUCED):
        return None
    return Float8SequenceShards(mesh, linears[0])
