"""The one plan by which every decoder is spread over a mesh.

Steps run in this order, because each reads what the one before left behind:

    tensor, expert, context parallel   replace parameters and wrap attention
    activation checkpointing           wraps blocks
    compile                            traces a block with its checkpointing
    FSDP/HSDP, or DDP                  hooks around compiled blocks; compile must not trace them

Everything happens on the meta device, before any parameter has memory.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan.models.moe import GroupedExperts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type

if TYPE_CHECKING:
    from torchtitan.config import JobConfig
    from torchtitan.config.job_config import Compile
    from torchtitan.distributed import ParallelDims


def parallelize_decoder(
    model: nn.Module, parallel_dims: "ParallelDims", job_config: "JobConfig"
) -> nn.Module:
    """Apply the job's parallelism, checkpointing and compilation in place; return the model.

    Raises ValueError for a kind of parallelism that the decoder does not support yet.
    """
    _apply_model_parallel(parallel_dims)
    compile_blocks = job_config.compile.enable and "model" in job_config.compile.components
    _maybe_checkpoint_activations(model, job_config, compile_blocks)
    if compile_blocks:
        apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
    _apply_data_parallel(model, parallel_dims, job_config, compile_blocks)
    return model


def _apply_model_parallel(parallel_dims: "ParallelDims") -> None:
    kinds = {
        "tensor": parallel_dims.tp,
        "expert": parallel_dims.ep,
        "context": parallel_dims.cp,
        "pipeline": parallel_dims.pp,
    }
    for kind, degree in kinds.items():
        if degree > 1:
            raise ValueError(
                f"parallelism.{kind}_parallel_degree = {degree} is not available yet; set it to 1 "
                "and use the data_parallel_* degrees"
            )


def _ops_saved_by_selective_checkpointing(compile_blocks: bool) -> set[Any]:
    """Outputs that are kept in "op" mode: those that cost more to compute than to store."""
    import torch._higher_order_ops
    import torch.distributed._functional_collectives  # noqa: F401 (registers operators)

    import torchtitan.models.attention_cpu  # noqa: F401 (registers operators)

    ops = torch.ops
    saved: set[Any] = {
        ops.aten.mm.default,
        ops.aten.max.default,  # scaling factors of low-precision matmuls
        ops.aten._scaled_dot_product_efficient_attention.default,
        ops.aten._scaled_dot_product_flash_attention.default,
        ops.aten._scaled_dot_product_cudnn_attention.default,
        ops.aten._scaled_dot_product_attention_math.default,
        ops.aten._scaled_dot_product_fused_attention_overrideable.default,
        ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        ops.torchtitan.document_attention.default,
        ops._c10d_functional.reduce_scatter_tensor.default,
        torch._higher_order_ops.flex_attention,
    }
    if not compile_blocks:
        # Flex attention compiled by itself is one such region. Inside a compiled block there is
        # none, and dynamo cannot trace a policy that mentions it.
        saved.add(torch._higher_order_ops.inductor_compiled_code)
    if get_device_type() != "cpu":
        import torch.nn.attention.varlen  # noqa: F401 (registers operators; loads inductor)

        saved.add(ops.torch_attn._varlen_attn.default)
    return saved


def _maybe_checkpoint_activations(
    model: nn.Module, job_config: "JobConfig", compile_blocks: bool
) -> None:
    ac_config = job_config.activation_checkpoint
    if ac_config.mode == "none":
        return
    from torchtitan.distributed.activation_checkpoint import apply_ac

    save_list = None
    if ac_config.mode == "selective" and ac_config.selective_ac_option == "op":
        save_list = _ops_saved_by_selective_checkpointing(compile_blocks)
    apply_ac(
        model,
        ac_config,
        model_compile_enabled=compile_blocks,
        op_sac_save_list=save_list,
        base_folder=job_config.job.dump_folder,
    )


def apply_compile(model: nn.Module, compile_config: "Compile", ep_enabled: bool = False) -> None:
    """Compile each block in place; blocks of one shape share the compiled code.

    Blocks whose experts wait for the device to know how many tokens they get, under expert
    parallelism or in a loop, are compiled in pieces around that. A second call does nothing.
    """
    options: dict[str, Any] = {"backend": compile_config.backend, "fullgraph": True}
    for name, block in model.layers.named_children():
        if isinstance(block, torch._dynamo.OptimizedModule):
            continue
        moe = block.moe if getattr(block, "moe_enabled", False) else None
        if moe is not None and (ep_enabled or not moe.experts.use_grouped_mm):
            _compile_around_experts(block, moe, options)
        else:
            model.layers.register_module(name, torch.compile(block, **options))
    logger.info("compiling each block with backend %r", compile_config.backend)


def _compile_around_experts(block: nn.Module, moe: nn.Module, options: dict[str, Any]) -> None:
    for piece in (block.attention, moe.router, moe.shared_experts):  # norms are one kernel anyway
        if piece is not None and piece._compiled_call_impl is None:
            piece.compile(**options)
    experts = moe.experts
    if isinstance(experts, GroupedExperts) and experts.use_grouped_mm:
        experts.compile_products(**options)


def _apply_data_parallel(
    model: nn.Module,
    parallel_dims: "ParallelDims",
    job_config: "JobConfig",
    compile_blocks: bool,
) -> None:
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.fsdp import apply_ddp, apply_fsdp

    training = job_config.training
    if parallel_dims.fsdp_enabled:
        axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(
            model,
            parallel_dims.get_mesh(axes),
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            pp_enabled=parallel_dims.pp_enabled,
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
        )
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=compile_blocks)
