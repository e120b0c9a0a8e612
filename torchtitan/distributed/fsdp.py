"""Data parallelism: FSDP2, HSDP and DDP.

All three SUM gradients over ranks. The loss is a sum over tokens divided by the number of valid
tokens in the global batch, so the sum over ranks is the gradient of the global mean, however
unevenly the valid tokens are spread.

The functions below expect a decoder: `tok_embeddings`, `layers` (a ModuleDict of blocks), `norm`
and `output`, each but `layers` possibly None on a pipeline stage.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_map_only

from torchtitan.tools.logging import logger


def apply_fsdp(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
) -> None:
    """Shard the model in place: embeddings, each block, and norm with output are one unit each.

    dp_mesh: one axis for FSDP; two, replicas outermost, for HSDP. Size 1 works, without
    communication. Parameters are gathered in `param_dtype`, gradients reduced in `reduce_dtype`.
    reshard_after_forward_policy: "always" frees a block's gathered parameters after its forward
    and gathers them anew in backward; "never" keeps them; "default" is always without pipeline
    parallelism (where every microbatch would gather again), else never.

    Raises ValueError for another policy.
    """
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    options: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(**dtypes)}
    if cpu_offload and dp_mesh.device_type == "cpu":
        logger.info("training.enable_cpu_offload has no effect: parameters are on the CPU anyway")
    elif cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()

    reshard = _reshard_after_forward(reshard_after_forward_policy, pp_enabled)
    # Backward begins with the last unit: freeing it after forward would only gather it again.
    reshard_last = reshard_after_forward_policy == "always"
    embeddings, norm, output = model.tok_embeddings, model.norm, model.output
    if embeddings is not None and output is not None and embeddings.weight is output.weight:
        # A parameter belongs to one unit, so the modules that share it are one unit too.
        tied = [module for module in (embeddings, norm, output) if module is not None]
        fully_shard(tied, reshard_after_forward=reshard_last, **options)
        norm = output = None
    elif embeddings is not None:
        fully_shard(embeddings, reshard_after_forward=reshard, **options)
    # Hidden states come in param_dtype from the embeddings, or by the root's cast. Position
    # tables come in fp32 and have to stay so: bf16 cannot tell a cosine from its neighbours'.
    block_options = options | {
        "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    }
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=reshard, **block_options)
    if norm is not None and output is not None:
        fully_shard([norm, output], reshard_after_forward=reshard_last, **options)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)


def _reshard_after_forward(policy: str, pp_enabled: bool) -> bool:
    if policy == "default":
        return not pp_enabled
    if policy not in ("always", "never"):
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward must be default, always or never, "
            f"got {policy!r}"
        )
    return policy == "always"


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Have every FSDP module of the model sum gradients over ranks instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor is otherwise applied inside the collective, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def reshard_model(model: nn.Module) -> None:
    """Free all gathered parameters, so that every parameter is its shard; no-op without FSDP.

    A forward without backward leaves the last unit gathered. Its parameters are then plain
    tensors, which optimizers and checkpoints don't know.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def apply_ddp(model: nn.Module, dp_mesh: DeviceMesh, enable_compile: bool) -> None:
    """Replicate the model in place on a 1-D mesh; gradients are summed over it in backward.

    The model keeps plain parameters under their old names. `enable_compile` says that blocks
    are compiled, and lets the compiler split graphs where DDP's buckets end.
    """
    from torch.distributed._composable.replicate import replicate

    if enable_compile:
        torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    # Buffers stay each rank's own: what some count, experts' tokens, is summed over ranks later.
    replicate(model, process_group=dp_mesh.get_group(), bucket_cap_mb=100, broadcast_buffers=False)
    # DDP's mean cannot become a sum in its communication hook: there, gradients of earlier
    # microbatches, reduced before, are already added in. Scaling what enters backward can.
    model.register_forward_hook(partial(_scale_gradient_of_output, float(dp_mesh.size())))


def _scale_gradient_of_output(factor: float, module: nn.Module, args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(Tensor, lambda tensor: _ScaleGradient.apply(tensor, factor), output)


class _ScaleGradient(torch.autograd.Function):
    """The tensor itself in forward; its gradient times a factor in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
