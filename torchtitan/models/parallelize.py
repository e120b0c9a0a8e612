"""The plan that distributes every decoder over a mesh.

On the meta device, in this order, because each step depends on the one before:

    expert, tensor parallel            replaces parameters
    activation checkpointing           wraps blocks
    compile                            traces a block with its checkpointing
    FSDP/HSDP, or DDP                  hooks around compiled blocks; compile must not trace hooks
"""

from typing import Any

import torch
from torch import nn

import torchtitan.distributed.collectives
import torchtitan.models.attention_cpu
import torchtitan.models.moe.grouped_mm
import torchtitan.numerics.delta_rule
import torchtitan.numerics.low_rank
import torchtitan.numerics.nf4  # noqa: F401 (registers operators, as those above)
from torchtitan import distributed
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks.device import device_limits
from torchtitan.config.job_config import Compile
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.collectives import OPS
from torchtitan.models.attention import choose_kernel_options
from torchtitan.numerics.products import compile_options
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type


def parallelize_decoder(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Apply the config's parallelism, checkpointing and compilation in place; return the model."""
    for problem in device_limits(job_config, parallel_dims, model):
        raise ValueError(problem)
    if parallel_dims.ep_enabled or parallel_dims.tp_enabled:
        # Imported only here, because it loads DTensor, which takes a third of torch's import time.
        from torchtitan.models.tp_plan import split_parameters

        split_parameters(model, parallel_dims, job_config)
    compile_blocks = job_config.compile.applies_to("model")
    ac_config = job_config.activation_checkpoint
    if ac_config.mode != "none":
        distributed.apply_ac(
            model,
            ac_config,
            model_compile_enabled=compile_blocks,
            op_sac_save_list=_ops_saved_by_selective_checkpointing(compile_blocks),
            base_folder=job_config.job.dump_folder,
            reads_device=parallel_dims.ep_enabled,
        )
    if compile_blocks:
        apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
    _apply_data_parallel(model, parallel_dims, job_config, compile_blocks)
    return model


parallelize_decoder.shards_one_rank = True  # see `TrainSpec.fact`


def _ops_saved_by_selective_checkpointing(compile_blocks: bool) -> set[Any]:
    """Return the operators whose outputs "op" mode keeps, because recomputing them costs too much."""
    ops = torch.ops
    saved: set[Any] = {
        ops.aten.mm.default,
        ops.torchtitan.mm.default,  # mm by oneDNN
        ops.aten.addmm.default,  # a Linear with a bias
        ops.torchtitan.linear_with_low_rank.default,  # a Linear with an adapter
        ops.torchtitan.nf4_mm.default,
        ops.torchtitan.grouped_mm.default,
        ops.aten.max.default,  # scaling factors of low-precision matmuls
        ops.torchtitan.document_attention.default,
        ops.torchtitan.gated_delta_rule.default,
        ops.torchtitan.fla_gated_delta_rule.default,
        OPS.reduce_scatter_tensor.default,
        ops.torchtitan.reduce_scatter.default,  # the reduce-scatter on the CPU
        OPS.all_to_all_single.default,
        ops.higher_order.flex_attention,
    }
    products = torch_parts.members("low_precision_products")
    saved |= {packet.default for packet in products + torch_parts.members("costly_operators")}
    if not compile_blocks:
        # The operator that flex attention becomes when compiled on its own. A compiled block has no such
        # operator, and dynamo cannot trace a policy that names it.
        saved.add(ops.higher_order.inductor_compiled_code)
    if get_device_type() != "cpu":
        saved.add(torch_parts.varlen.default)
    return saved


def __getattr__(name: str) -> Any:
    """Return `_op_sac_save_list` of 0.2.x, read-only: changing it would not change what is saved."""
    if name != "_op_sac_save_list":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return frozenset(_ops_saved_by_selective_checkpointing(compile_blocks=False))


def apply_compile(model: nn.Module, compile_config: Compile, ep_enabled: bool = False) -> None:
    """Compile each block in place; blocks of the same shape share the compiled code.

    If a block's experts read their token counts on the host, its attention, router and shared experts are
    compiled separately. This is so under expert parallelism, and if experts are computed one by one.
    A second call does nothing.
    """
    # The compiler limits the number of compiled variants of all blocks together, and with fullgraph exceeding
    # the limit is an error. Layer kinds, dynamic shapes, no_grad and context parallelism each add variants.
    dynamo = torch_parts.dynamo_config
    host.change_attribute(dynamo, "recompile_limit", max(dynamo.recompile_limit, 64))
    options: dict[str, Any] = {"backend": compile_config.backend, "fullgraph": True}
    if get_device_type() == "cpu" and compile_config.backend == "inductor":
        options["options"] = compile_options()
    choose_kernel_options(model)
    for name, block in model.layers.named_children():
        if torch_parts.is_compiled(block):
            continue
        moe = block.moe if getattr(block, "moe_enabled", False) else None
        if moe is None or (moe.experts.use_grouped_mm and not ep_enabled):
            model.layers.register_module(name, torch.compile(block, **options))
            continue
        # Norms are left out: each is one kernel without compiling.
        for piece in (block.attention, moe.router, moe.shared_experts):
            # A second `compile` would compile again, so look at the private attribute in which
            # `Module.compile` stores the compiled call (torch 2.13).
            if piece is not None and torch_parts.compiled_call(piece) is None:
                piece.compile(**options)
        if moe.experts.use_grouped_mm:
            moe.experts.compile_products(**options)
    logger.debug("compiling each block with backend %r", compile_config.backend)


def _apply_data_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, compile_blocks: bool
) -> None:
    training = job_config.training
    replicates = parallel_dims.dp_replicate_enabled
    if parallel_dims.uses_fsdp:
        expert_axes = ["dp_replicate", "efsdp"] if replicates else ["efsdp"]
        distributed.apply_fsdp(
            model,
            parallel_dims.get_fsdp_mesh(),
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            pp_enabled=parallel_dims.pp_enabled,
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
            ep_degree=parallel_dims.ep,
            edp_mesh=parallel_dims.get_mesh(expert_axes) if parallel_dims.ep_enabled else None,
            register_buffers=job_config.parallelism.fsdp_register_buffers,
        )
    elif replicates and not parallel_dims.pp_enabled:  # the pipeline schedule reduces gradients
        mesh = parallel_dims.get_mesh("dp_replicate")
        distributed.apply_ddp(model, mesh, enable_compile=compile_blocks)
