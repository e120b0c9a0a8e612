"""Data parallelism: FSDP2, HSDP and DDP.

All three SUM gradients over ranks; `scale_gradients` makes that a mean. The loss is a sum over
tokens divided by the number of valid tokens in the global batch, so the sum over ranks is the
gradient of the global mean, however unevenly the valid tokens are spread.

The functions below expect a decoder: `tok_embeddings`, `layers` (a ModuleDict of blocks), `norm`
and `output`, or `score` in its place, each but `layers` possibly None on a pipeline stage.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from torchtitan.distributed.collectives import broadcast_all, is_gloo, sum_over_ranks
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.distributed.own_groups import making_groups
from torchtitan.tools import host
from torchtitan.tools.logging import logger

_BUCKET_BYTES = 100 * 2**20


class CpuAllGather(DefaultAllGather):
    """How FSDP gathers parameters that lie on the CPU. The input is a part of the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not is_gloo(group):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        broadcast_all(output_tensor.view(group.size(), -1), group)
        return None


class CpuReduceScatter(DefaultReduceScatter):
    """How FSDP sums gradients that lie on the CPU, in the order of ranks."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op != dist.ReduceOp.SUM or not is_gloo(group):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        sum_over_ranks(input_tensor, group, output_tensor)
        return None


def apply_fsdp(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str | int = "default",
    ep_degree: int = 1,
    edp_mesh: DeviceMesh | None = None,
    gradient_divide_factor: int | None = None,
    register_buffers: bool = False,
) -> None:
    """Shard the model in place: embeddings, each block, and norm with output are one unit each.

    dp_mesh: one axis for FSDP; two, replicas outermost, for HSDP. Size 1 works, without
    communication. Parameters are gathered in `param_dtype`, gradients reduced in `reduce_dtype`.
    reshard_after_forward_policy: "always" frees a block's gathered parameters after its forward
    and gathers them again in backward; "never" keeps them; "default" is "never" under pipeline
    parallelism, where every microbatch would gather again, else "always". A number n keeps them
    spread over n successive ranks of the shard axis, say those of a node, where backward gathers
    them. Experts, of which each rank has its own, are then freed as by "always".
    ep_degree: ranks among which the experts of a block were dealt. Above 1, each block's experts
    are a unit, sharded on `edp_mesh`, whose last axis holds the ranks with the same experts.
    gradient_divide_factor: accepted for compatibility; gradients are never divided.
    register_buffers: have what is sent and received allocated by the process group.

    Raises ValueError for another policy, and for a number that does not divide the shard axis.
    """
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    options: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(**dtypes)}
    if cpu_offload and dp_mesh.device_type == "cpu":
        logger.info("training.enable_cpu_offload has no effect: parameters are on the CPU anyway")
    elif cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()

    reshard = _reshard_after_forward(reshard_after_forward_policy, pp_enabled, dp_mesh)
    shard_unit = fully_shard if isinstance(reshard, bool) else _fully_shard_within(reshard, dp_mesh)
    # Backward begins with the last unit: freeing it after forward would only gather it again.
    reshard_last = reshard_after_forward_policy == "always"
    embeddings, norm = model.tok_embeddings, model.norm
    output = model.output or getattr(model, "score", None)
    if embeddings is not None and output is not None and embeddings.weight is output.weight:
        # A parameter belongs to one unit, so the modules that share it are one unit too.
        tied = [module for module in (embeddings, norm, output) if module is not None]
        fully_shard(tied, reshard_after_forward=reshard_last, **options)
        norm = output = None
    elif embeddings is not None:
        shard_unit(embeddings, reshard_after_forward=reshard, **options)
    # Hidden states come in param_dtype from the embeddings, or by the root's cast. Position
    # tables come in fp32 and have to stay so: bf16 cannot tell a cosine from its neighbours'.
    block_options = options | {
        "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    }
    blocks = list(model.layers.values())
    for block in blocks:
        if ep_degree > 1 and block.moe_enabled:
            experts = block.moe.experts
            fully_shard(
                experts,
                reshard_after_forward=bool(reshard),
                shard_placement_fn=_expert_placement(experts, ep_degree, edp_mesh),
                **(block_options | {"mesh": edp_mesh}),
            )
        shard_unit(block, reshard_after_forward=reshard, **block_options)
    if norm is not None and output is not None:
        fully_shard([norm, output], reshard_after_forward=reshard_last, **options)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    if ep_degree > 1:
        _prefetch_in_order(embeddings, blocks, output)
    if dp_mesh.device_type == "cpu":
        for unit in _units_of(model):
            unit.set_custom_all_gather(CpuAllGather())
            unit.set_custom_reduce_scatter(CpuReduceScatter())
        if register_buffers:
            logger.info("parallelism.fsdp_register_buffers has no effect on the CPU")
    elif register_buffers:
        # NCCL registers such memory with the network; where it cannot, torch allocates. It has no
        # memory to give before its communicator is there, which the first collective makes.
        for mesh in (dp_mesh, edp_mesh):
            if mesh is not None:
                group = mesh.get_group(mesh.ndim - 1)
                torch.distributed.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
        for unit in _units_of(model):
            unit.set_allocate_memory_from_process_group_for_comm(True)


def _units_of(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP gathers and reduces one at a time; none if it is not used."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _expert_placement(
    experts: nn.Module, ep_degree: int, edp_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Shard] | None:
    """How FSDP splits parameters [E, M, ...]: along M if there are more ranks than experts."""
    num_shards = edp_mesh.size(edp_mesh.ndim - 1)
    if num_shards * ep_degree <= experts.num_experts:
        return None

    def placement(parameter: nn.Parameter) -> Shard:
        # FSDP pads uneven shares along the first dim only; there, some ranks then hold nothing.
        return Shard(0 if parameter.to_local().shape[1] % num_shards else 1)

    return placement


def _prefetch_in_order(
    embeddings: nn.Module | None, blocks: list[nn.Module], output: nn.Module | None
) -> None:
    """Have each unit gather the next one's parameters, too.

    FSDP by itself gathers when the host comes to a unit, which is early enough as long as the
    host runs ahead of the device. Where experts are dealt, it waits in each block.
    """
    units = [[block, block.moe.experts] if block.moe_enabled else [block] for block in blocks]
    units = [[embeddings], *units, [output]]
    # Leaves out None, and modules that belong to another's unit.
    units = [[module for module in unit if isinstance(module, FSDPModule)] for unit in units]
    for unit, following in pairwise(unit for unit in units if unit):
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(unit)


def _reshard_after_forward(policy: str | int, pp_enabled: bool, dp_mesh: DeviceMesh) -> bool | int:
    """What `fully_shard` takes: whether to, or to how many ranks, of which there are more."""
    num_ranks = dp_mesh.size(dp_mesh.ndim - 1)
    if isinstance(policy, int) or policy.isdecimal():
        kept_on = int(policy)
        if kept_on < 2 or num_ranks % kept_on:
            raise ValueError(
                f"parallelism.fsdp_reshard_after_forward = {policy!r} must be a divisor above 1 of "
                f"the {num_ranks} ranks that share the parameters; 'never' keeps them whole on "
                f"every rank"
            )
        return True if kept_on == num_ranks else kept_on
    if policy == "default":
        return not pp_enabled
    if policy not in ("always", "never"):
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward must be default, always, never or a number "
            f"of ranks, got {policy!r}"
        )
    return policy == "always"


def _fully_shard_within(num_ranks: int, dp_mesh: DeviceMesh) -> Callable[..., Any]:
    """`fully_shard`, for reshard_after_forward=num_ranks: all units share one mesh for that.

    torch makes a mesh for each unit, with its own process groups, and on this rank's dp_mesh
    only: all ranks of the world have to make process groups together.
    """
    axis = dp_mesh.ndim - 1
    names = "fsdp_between", "fsdp_within"
    sizes = dp_mesh.size(axis) // num_ranks, num_ranks
    # No rank communicates on the outer one.
    with making_groups():
        mesh = dp_mesh._unflatten(axis, sizes, names, backend_override={names[0]: "fake"})[names]
    mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def shard_unit(module: nn.Module, **options: Any) -> None:
        make_mesh = torch_fsdp._get_post_forward_mesh_info
        torch_fsdp._get_post_forward_mesh_info = lambda *_: mesh_info
        try:
            fully_shard(module, **options)
        finally:
            torch_fsdp._get_post_forward_mesh_info = make_mesh

    return shard_unit


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Have every FSDP module of the model sum gradients over ranks instead of averaging them."""
    for unit in _units_of(model):
        unit.set_gradient_divide_factor(1.0)
        # A factor is otherwise applied inside the collective, which gloo cannot do.
        unit.set_force_sum_reduction_for_comms(True)


def reshard_model(model: nn.Module) -> None:
    """Free all gathered parameters, so that every parameter is its shard; no-op without FSDP.

    A forward without backward leaves the last unit gathered. Its parameters are then plain
    tensors, which optimizers and checkpoints don't know.
    """
    for unit in _units_of(model):
        unit.reshard()
        # Backward goes through the forwards since the last backward to gather ahead, and would
        # gather what a forward without backward used last.
        for group in _param_groups(unit):
            if hasattr(group.comm_ctx, "post_forward_order"):  # there was a forward
                group.comm_ctx.post_forward_order.clear()
                group._post_forward_indices.clear()


def bytes_to_keep_gathered(model: nn.Module) -> int:
    """What this rank would hold besides, if forwards did not free the parameters they gather."""
    total = 0
    for unit in _units_of(model):
        for group in _param_groups(unit):
            if group.post_forward_mesh_info is None:  # its forward frees nothing
                continue
            for parameter in group.fsdp_params:
                dtype = group.mp_policy.param_dtype or parameter.sharded_param.dtype
                total += math.prod(parameter._orig_size) * dtype.itemsize
    return total


@contextlib.contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, each unit is gathered by its first forward and stays so; freed at the end."""
    before = [
        (group, group.post_forward_mesh_info)
        for unit in _units_of(model)
        for group in _param_groups(unit)
    ]
    for group, _ in before:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        reshard_model(model)
        for group, mesh_info in before:
            group.post_forward_mesh_info = mesh_info


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def reduce_later(model: nn.Module, later: bool, *, whole: bool, keeps_weights: bool) -> None:
    """While `later`, have backward add up gradients on each rank, for a later backward to reduce.

    whole: reduce nothing. Otherwise HSDP's gradients are still reduce-scattered among the ranks of
        a copy, and wait as shards to be summed over the copies; FSDP and DDP do as always.
    keeps_weights: backward does not free what the next forward gathers again.
    """
    if not whole:
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(not later)
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP's or DDP's
        model.set_requires_gradient_sync(not later)
    if keeps_weights and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not later)


def recover_model(model: nn.Module) -> None:
    """Make the model ready for its next forward after a forward or backward failed half-way.

    FSDP would go on with the weights it had gathered then. No-op without FSDP.
    """
    # FSDP knows its own root from the first forward on; before that, it has gathered nothing.
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        _reset_iter_state(model)
    # Drop gradients of gathered parameters: the next backward would reduce them with its own.
    for unit in _units_of(model):
        for group in _param_groups(unit):
            for fsdp_param in group.fsdp_params:
                fsdp_param.unsharded_accumulated_grad = None
                parameter = getattr(fsdp_param, "_unsharded_param", None)
                if parameter is not None:
                    parameter.grad = None


def _reset_iter_state(model: FSDPModule) -> None:
    """What `FSDPModule.reset_iter_state` does, for torch 2.11, which lacks it."""
    root = model._get_fsdp_state()
    if root._device.type != "cpu":
        root._device_handle.synchronize()  # collectives run on streams of their own
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
    for unit in _units_of(model):
        for group in _param_groups(unit):
            group._all_gather_result = group._all_reduce_state = None
            group._post_reduce_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group.reshard()


def apply_ddp(model: nn.Module, dp_mesh: DeviceMesh, enable_compile: bool) -> None:
    """Replicate the model in place on a 1-D mesh; gradients are summed over it in backward.

    The model keeps plain parameters under their old names. `enable_compile` says that blocks
    are compiled, and lets the compiler split graphs where DDP's buckets end.
    """
    if enable_compile:
        host.change_attribute(torch._dynamo.config, "optimize_ddp", "ddp_optimizer")
    # Buffers stay each rank's own: what some count, experts' tokens, is summed over ranks later.
    replicate(model, process_group=dp_mesh.get_group(), bucket_cap_mb=100, broadcast_buffers=False)
    # DDP's mean cannot become a sum in its communication hook: there, gradients of earlier
    # microbatches, reduced before, are already added in. Scaling what enters backward can.
    scale_gradients(model, float(dp_mesh.size()))


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply all gradients of the model by `factor`, however it is spread over ranks.

    The gradients of its output are multiplied, where backward begins; of a pipeline, give the last
    stage.
    """

    def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        return tree_map_only(Tensor, lambda tensor: _ScaleGradient.apply(tensor, factor), output)

    model.register_forward_hook(scale_output)


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients over the ranks of a 1-D mesh, in place; none counts as zero.

    For modules that DDP cannot follow: in a pipeline's stages, forwards and backwards of several
    microbatches alternate.
    """
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(local_tensor(parameter.grad))
    for bucket in torch._utils._take_tensors(grads, _BUCKET_BYTES):  # of one dtype each
        flat = torch.cat([grad.flatten() for grad in bucket])
        torch.distributed.all_reduce(flat, group=mesh.get_group())
        for grad, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


class _ScaleGradient(torch.autograd.Function):
    """The tensor itself in forward; its gradient times a factor in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
