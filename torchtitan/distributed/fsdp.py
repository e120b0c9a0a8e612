"""Data parallelism: FSDP2, HSDP and DDP.

All three SUM gradients over ranks: the loss is a sum over tokens divided by the number of valid tokens
in the global batch, so the sum is the gradient of the global mean. `scale_gradients` turns sums into means.

The model is a decoder: `tok_embeddings`, `layers` (a ModuleDict of blocks), `norm`, and `output` or
`score`. On a pipeline stage all but `layers` may be None.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from torchtitan.distributed.collectives import broadcast_all, sum_over_ranks
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger


class CpuAllGather:
    """Gathers FSDP's parameters on the CPU. The input tensor is this rank's slice of the output tensor."""

    allocate = staticmethod(torch.empty)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        broadcast_all(output_tensor.view(group.size(), -1), group)


class CpuReduceScatter:
    """Sums FSDP's gradients on the CPU, in rank order."""

    allocate = staticmethod(torch.empty)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        sum_over_ranks(input_tensor, group, output_tensor)


def apply_fsdp(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
    ep_degree: int = 1,
    edp_mesh: DeviceMesh | None = None,
    gradient_divide_factor: int | None = None,
    register_buffers: bool = False,
) -> None:
    """Shard the model in place. FSDP's units are the embeddings, each block, and norm with output.

    dp_mesh: [shard] for FSDP, [replicate, shard] for HSDP. Size 1 works, without communication.
    reshard_after_forward_policy: "always" frees a block's gathered parameters after its forward,
        and backward gathers them again. "never" keeps them. "default" is "never" under pipeline
        parallelism, and on a mesh of one rank without cpu_offload; otherwise "always".
    ep_degree: the number of ranks over which a block's experts are distributed. Above 1, each block's
        experts are a unit, sharded on `edp_mesh`, whose last axis has the ranks with the same experts.
    gradient_divide_factor: ignored; gradients are never divided.
    """
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    options: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(**dtypes)}
    if cpu_offload and dp_mesh.device_type == "cpu":
        logger.info("training.enable_cpu_offload has no effect: parameters are on the CPU already")
    elif cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    elif dp_mesh.size() == 1:
        # Exclude frozen weights that need neither a gather nor a cast, because FSDP would copy them.
        final = param_dtype, torch.uint8
        frozen = (p for p in model.parameters() if not p.requires_grad)
        options["ignored_params"] = {p for p in frozen if p.dtype in final}

    keeps = pp_enabled or (dp_mesh.size() == 1 and not cpu_offload)
    reshard = _is_resharded(reshard_after_forward_policy, keeps)
    # Backward begins with the last unit: freeing it after forward would only cost another all-gather.
    reshard_last = reshard_after_forward_policy == "always"
    embeddings, norm = model.tok_embeddings, model.norm
    output = model.output or getattr(model, "score", None)
    if embeddings is not None and output is not None and embeddings.weight is output.weight:
        # A parameter belongs to one unit, so modules that share a parameter have to be in one unit.
        tied = [module for module in (embeddings, norm, output) if module is not None]
        fully_shard(tied, reshard_after_forward=reshard_last, **options)
        norm = output = None
    elif embeddings is not None:
        fully_shard(embeddings, reshard_after_forward=reshard, **options)
    # No cast of a block's inputs: hidden states are in param_dtype, and RoPE tables must stay in fp32.
    no_cast = {"mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)}
    block_options = options | no_cast
    blocks = list(model.layers.values())
    exact = [x for block in blocks for x in block.modules() if getattr(x, "keeps_fp32", False)]
    if exact:
        # fp32 modules get their own unit: FSDP casts all parameters of a unit to one dtype. Compiled blocks
        # can't call this unit's hooks, so the model's forward gathers it, and the end of backward reduces it.
        in_fp32 = {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        fully_shard(exact, reshard_after_forward=False, **(options | in_fp32))
    for block in blocks:
        if ep_degree > 1 and block.moe_enabled:
            experts = block.moe.experts
            fully_shard(
                experts,
                reshard_after_forward=reshard,
                shard_placement_fn=_expert_placement(experts, ep_degree, edp_mesh),
                **(block_options | {"mesh": edp_mesh}),
            )
        fully_shard(block, reshard_after_forward=reshard, **block_options)
    if norm is not None and output is not None:
        fully_shard([norm, output], reshard_after_forward=reshard_last, **options)
    fully_shard(model, **options)
    if exact:
        model.register_forward_pre_hook(lambda *_: exact[0].unshard())
    disable_fsdp_gradient_division(model)
    if ep_degree > 1:
        _prefetch_in_order(embeddings, blocks, output)
    _choose_collectives(model, dp_mesh, edp_mesh, register_buffers)


def _choose_collectives(
    model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh | None, register_buffers: bool
) -> None:
    if dp_mesh.device_type == "cpu":
        for unit in _units_of(model):
            unit.set_custom_all_gather(CpuAllGather())
            unit.set_custom_reduce_scatter(CpuReduceScatter())
        if register_buffers:
            logger.info("parallelism.fsdp_register_buffers has no effect on the CPU")
    elif register_buffers:
        # NCCL can allocate buffers only after a first collective has created the communicator.
        for mesh in (dp_mesh, edp_mesh):
            if mesh is not None:
                group = mesh.get_group(mesh.ndim - 1)
                dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
        for unit in _units_of(model):
            unit.set_allocate_memory_from_process_group_for_comm(True)


def _units_of(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers and reduces one at a time; none without FSDP."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _expert_placement(
    experts: nn.Module, ep_degree: int, edp_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Shard] | None:
    """Return a function from an expert parameter [E, M, ...] to its FSDP placement; None means Shard(0).

    If there are more ranks than experts, FSDP shards dim 1, provided that the number of ranks divides it.
    """
    num_shards = edp_mesh.size(edp_mesh.ndim - 1)
    if num_shards * ep_degree <= experts.num_experts:
        return None

    def placement(parameter: nn.Parameter) -> Shard:
        # FSDP can pad uneven shards only along dim 0, where some ranks then hold nothing.
        return Shard(0 if parameter.to_local().shape[1] % num_shards else 1)

    return placement


def _prefetch_in_order(
    embeddings: nn.Module | None, blocks: list[nn.Module], output: nn.Module | None
) -> None:
    """Make each unit prefetch the next unit, whose gather would otherwise start late: in MoE blocks the host
    waits for token counts before it reaches the next unit."""
    units = [[block, block.moe.experts] if block.moe_enabled else [block] for block in blocks]
    units = [[embeddings], *units, [output]]
    # Leave out None, and modules that are part of another module's unit.
    units = [[module for module in unit if isinstance(module, FSDPModule)] for unit in units]
    for unit, following in pairwise(unit for unit in units if unit):
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(unit)


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Make every FSDP module of the model sum gradients over ranks instead of averaging them."""
    for unit in _units_of(model):
        # On a mesh of one rank, torch 2.13 would spend time on dividing gradients by a factor of 1.
        groups = torch_parts.fsdp_groups_of(torch_parts.fsdp_state(unit))
        if any(torch_parts.fsdp_mesh(group).mesh.size() > 1 for group in groups):
            unit.set_gradient_divide_factor(1.0)
        # Without this, FSDP would ask the collective to divide by the factor, which gloo cannot do.
        unit.set_force_sum_reduction_for_comms(True)


def _is_resharded(policy: str, keeps_by_default: bool) -> bool:
    """Return True if a block's gathered parameters are freed after its forward."""
    policies = {"default": not keeps_by_default, "always": True, "never": False}
    if policy not in policies:
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward must be one of {', '.join(policies)}, got {policy!r}"
        )
    return policies[policy]


def reshard_model(model: nn.Module) -> None:
    """Free all gathered parameters: optimizers and checkpoints need shards. No-op without FSDP.

    A forward without backward leaves the last unit gathered.
    """
    for unit in _units_of(model):
        unit.reshard()
    # Backward prefetches in the recorded order of forwards: drop forwards without a backward (torch 2.13).
    for group in _param_groups(model):
        communication = torch_parts.fsdp_communication(group)
        forwards = torch_parts.field_of(communication, "fsdp_forwards")
        # `forwards` is None before the first forward.
        if forwards is not None:
            forwards.clear()
            torch_parts.fsdp_order(group).clear()


def bytes_to_keep_gathered(model: nn.Module) -> int:
    """Return the extra bytes this rank would hold if forwards didn't free what they gather."""
    groups = _param_groups(model)
    freed = [group for group in groups if torch_parts.fsdp_forward_mesh(group) is not None]
    total = 0
    for parameter in (p for group in freed for p in torch_parts.fsdp_params(group)):
        dtype = torch_parts.fsdp_shard(parameter).dtype
        if dtype.is_floating_point:
            dtype = torch_parts.fsdp_dtypes(parameter).param_dtype or dtype
        total += math.prod(torch_parts.fsdp_size(parameter)) * dtype.itemsize
    return total


@contextlib.contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """A context in which each unit stays gathered after its first forward. The exit frees all units."""
    # `set_reshard_after_forward` would forget the mesh that parameters are resharded to after forward.
    groups, field = _param_groups(model), torch_parts.attribute("fsdp_forward_mesh")
    before = [torch_parts.fsdp_forward_mesh(group) for group in groups]
    for group in groups:
        setattr(group, field, None)
    try:
        yield
    finally:
        reshard_model(model)
        for group, mesh in zip(groups, before, strict=True):
            setattr(group, field, mesh)


def _param_groups(model: nn.Module) -> list[Any]:
    states = map(torch_parts.fsdp_state, _units_of(model))
    return [group for state in states for group in torch_parts.fsdp_groups_of(state)]


def reduce_later(model: nn.Module, later: bool, *, whole: bool, keeps_weights: bool) -> None:
    """If `later`, backward accumulates gradients on each rank; a backward after `later=False` reduces them.

    whole: delay all reductions. Otherwise only HSDP is affected: gradients are still
        reduce-scattered within a replica, and their shards wait to be summed over replicas.
    keeps_weights: backward does not free parameters, which the next forward would gather again.
    """
    if not whole:
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(not later)
        return
    # FSDP and DDP both have this method.
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not later)
    if keeps_weights and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not later)


def accumulate_gradients(model: nn.Module) -> None:
    """Make backward keep unreduced gradients and gathered parameters until `reduce_accumulated_gradients`.

    For pipelines, where the backward of weights runs no FSDP hook. No-op without FSDP.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    # `finalize_backward` exists since torch 2.15.
    if hasattr(model, "finalize_backward"):
        model.set_manual_backward_finalization(True)
    else:
        model.set_is_last_backward(False)


def store_gradients(model: nn.Module) -> None:
    """Accumulate gradients in reduce_dtype, after a backward that ran no FSDP hook."""
    for group in _param_groups(model):
        torch_parts.fsdp_post_backward(group)


def reduce_accumulated_gradients(model: nn.Module) -> None:
    """Reduce the gradients accumulated since `accumulate_gradients`. No-op without FSDP."""
    if not isinstance(model, FSDPModule):
        return
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    if hasattr(model, "finalize_backward"):
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        return
    # The same calls as FSDP's hooks make at the end of a full backward (torch 2.13).
    model.set_is_last_backward(True)
    for group in _param_groups(model):
        torch_parts.fsdp_post_backward(group)
    torch_parts.fsdp_end_backward(torch_parts.fsdp_state(model))


def recover_model(model: nn.Module) -> None:
    """Make the model ready for the next forward after a forward or backward failed. No-op without FSDP."""
    if not isinstance(model, FSDPModule):
        return
    # Before the first forward nothing is gathered, and FSDP does not know its root unit yet.
    if torch_parts.fsdp_is_root(torch_parts.fsdp_state(model)) is None:
        return
    parameters = [p for x in _param_groups(model) for p in torch_parts.fsdp_params(x)]
    shards = [torch_parts.fsdp_shard(p) for p in parameters]
    reduced = [shard.grad for shard in shards]
    torch_parts.reset_fsdp(model)
    # Torch 2.15 also drops the gradients of earlier microbatches. Older versions keep the gradients of
    # gathered parameters, to which the next backward would add.
    for shard, grad in zip(shards, reduced, strict=True):
        shard.grad = grad
    field = torch_parts.attribute("fsdp_gradient")
    for parameter in parameters:
        # In torch 2.15 the field is a property, which is empty now.
        if not isinstance(getattr(type(parameter), field, None), property):
            setattr(parameter, field, None)
        gathered = torch_parts.field_of(parameter, "fsdp_gathered")
        if gathered is not None:
            gathered.grad = None


def apply_ddp(model: nn.Module, dp_mesh: DeviceMesh, enable_compile: bool) -> None:
    """Replicate the model in place on a 1-D mesh; backward sums gradients over the mesh."""
    # Let the compiler split graphs where DDP's buckets end.
    if enable_compile:
        host.change_attribute(torch_parts.dynamo_config, "optimize_ddp", "ddp_optimizer")
    # Buffers are not broadcast, because each rank has its own token counts per expert in a buffer.
    group = dp_mesh.get_group()
    torch_parts.replicate(model, process_group=group, bucket_cap_mb=100, broadcast_buffers=False)
    # Undo DDP's averaging. A communication hook can't, because it gets some gradients after reduction.
    scale_gradients(model, float(dp_mesh.size()))


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Make every backward multiply the model's gradients by `factor`. For a pipeline, pass the last stage."""

    def scale_gradient_of_output(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in torch_parts.pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: gradient * factor)

    model.register_forward_hook(scale_gradient_of_output)


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients over the ranks of a 1-D mesh, in place; a missing gradient counts as zero."""
    sums = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = local_tensor(parameter.grad)
        # NCCL refuses tensors that are not contiguous.
        summed = local.contiguous()
        work = dist.all_reduce(summed, group=mesh.get_group(), async_op=True)
        sums.append((local, summed, work))
    for local, summed, work in sums:
        work.wait()
        if summed is not local:
            local.copy_(summed)
