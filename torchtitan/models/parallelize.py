"""The one plan by which every decoder is spread over a mesh.

Steps run in this order, because each reads what the one before left:

    expert, tensor parallel            replace parameters
    activation checkpointing           wraps blocks
    compile                            traces a block with its checkpointing
    FSDP/HSDP, or DDP                  hooks around compiled blocks; compile must not trace them

Everything happens on the meta device, before any parameter has memory.
"""

from typing import Any

import torch
import torch._higher_order_ops
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import torchtitan.models.attention_cpu
import torchtitan.models.moe.grouped_mm  # noqa: F401 (registers operators, as the one above)
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks.device import device_limits
from torchtitan.config.job_config import Compile
from torchtitan.distributed import ParallelDims
from torchtitan.tools import host
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type


def parallelize_decoder(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Apply the job's parallelism, checkpointing and compilation in place; return the model.

    Raises ValueError for what kernels of the device cannot do.
    """
    for problem in device_limits(job_config, parallel_dims, model):
        raise ValueError(problem)
    if parallel_dims.ep_enabled:
        apply_moe_ep_tp(
            model,
            tp_mesh=parallel_dims.get_optional_mesh("tp"),
            ep_mesh=parallel_dims.get_mesh("ep"),
            etp_mesh=parallel_dims.get_optional_mesh("etp"),
            ep_etp_mesh=parallel_dims.get_optional_mesh(["ep", "etp"]),
        )
        logger.info(
            "expert parallelism on %d ranks, each split %d-fold",
            parallel_dims.ep,
            parallel_dims.etp,
        )
    if parallel_dims.tp_enabled:
        _apply_tensor_parallel(model, parallel_dims, job_config)

    compile_blocks = job_config.compile.applies_to("model")
    ac_config = job_config.activation_checkpoint
    if ac_config.mode != "none":
        # Loads the compiler, which a run without checkpointing need not wait for.
        from torchtitan.distributed.activation_checkpoint import apply_ac

        apply_ac(
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


# ---- tensor parallelism ----

# Parameter -> the dimension it is split along; None: every rank has it whole.
_OUTPUTS = {"weight": 0, "bias": 0}  # each rank computes some of a Linear's outputs
_INPUTS = {"weight": 1, "bias": None}  # each rank adds up some of its inputs
_ALIKE = {"weight": None, "bias": None}

TENSOR_PARALLEL_PLAN: dict[str, dict[str, int | None]] = {
    "tok_embeddings": _OUTPUTS,
    "norm": _ALIKE,
    "output": _OUTPUTS,
    "layers.*.attention_norm": _ALIKE,
    "layers.*.ffn_norm": _ALIKE,
    # attention, split by heads
    "layers.*.attention": {"sinks": 0},
    "layers.*.attention.wq": _OUTPUTS,
    "layers.*.attention.wk": _OUTPUTS,
    "layers.*.attention.wv": _OUTPUTS,
    "layers.*.attention.wo": _INPUTS,
    "layers.*.attention.q_norm": _ALIKE,
    "layers.*.attention.k_norm": _ALIKE,
    # latents that all heads share
    "layers.*.attention.wq_a": _ALIKE,
    "layers.*.attention.wq_b": _OUTPUTS,
    "layers.*.attention.wkv_a": _ALIKE,
    "layers.*.attention.kv_norm": _ALIKE,
    "layers.*.attention.wkv_b": _OUTPUTS,
    # feed-forward, and that of experts, split by hidden units
    "layers.*.feed_forward.w1": _OUTPUTS,
    "layers.*.feed_forward.w3": _OUTPUTS,
    "layers.*.feed_forward.w2": _INPUTS,
    "layers.*.moe.router.gate": _ALIKE,
    "layers.*.moe.shared_experts.w1": _OUTPUTS,
    "layers.*.moe.shared_experts.w3": _OUTPUTS,
    "layers.*.moe.shared_experts.w2": _INPUTS,
    "layers.*.moe.experts": {
        "w1": 1,
        "w3": 1,
        "w2": 2,
        "mlp1_weight": 1,
        "mlp1_bias": 1,
        "mlp2_weight": 2,
        "mlp2_bias": None,
    },
}


def apply_tp(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    loss_parallel: bool,
    enable_float8_tensorwise_tp: bool = False,
    enable_async_tp: bool = False,
    cp_enabled: bool = False,
) -> None:
    """Split the decoder over a 1-D mesh in place, as `TENSOR_PARALLEL_PLAN` says.

    loss_parallel: logits stay split along the vocabulary, as a DTensor.
    enable_float8_tensorwise_tp: gather hidden states and gradients in float8, in blocks all of
        whose linear layers torchao made float8 with one scale per tensor.
    enable_async_tp: write the blocks' collectives as the compiler's pass finds them, which
        `maybe_enable_async_tp` turns on.
    cp_enabled: accepted for compatibility; changes nothing here.

    Raises ValueError for a model that the plan doesn't fit.
    """
    # Loads DTensor, whose import takes a third of torch's: only for jobs that use it.
    from torchtitan.distributed.tensor_parallel import distribute_modules

    distribute_modules(
        model,
        tp_mesh,
        TENSOR_PARALLEL_PLAN,
        loss_parallel,
        overlap=enable_async_tp,
        float8_gather=enable_float8_tensorwise_tp,
    )


def _apply_tensor_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp  # as in apply_tp

    mesh = parallel_dims.get_mesh("tp")
    maybe_enable_async_tp(job_config, mesh)
    recipe = job_config.quantize.linear.float8.recipe_name
    apply_tp(
        model,
        mesh,
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        enable_float8_tensorwise_tp="quantize.linear.float8" in job_config.model.converters
        and recipe in (None, "tensorwise"),
        enable_async_tp=job_config.parallelism.enable_async_tensor_parallel,
    )


# ---- expert parallelism ----


def apply_moe_ep_tp(
    model: nn.Module,
    tp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    etp_mesh: DeviceMesh | None,
    ep_etp_mesh: DeviceMesh | None,
    dual_pipe_v: bool = False,
    use_deepep: bool = False,
) -> None:
    """Deal the experts of every block to ranks, or split each of them, or both; in place.

    tp_mesh, ep_mesh: 1-D, None where this parallelism is off. Where both are on, the ranks of
        `tp_mesh` share out the tokens.
    etp_mesh, ep_etp_mesh: the axis `etp`, and the mesh [ep, etp]. Given if experts are also split
        by hidden units, and tokens are not shared out.

    Call it before `apply_tp`, which skips modules that are already distributed.

    Raises ValueError for DualPipe and DeepEP, and for experts that the meshes don't divide.
    """
    # As in apply_tp.
    from torch.distributed.tensor.parallel import parallelize_module

    from torchtitan.distributed import expert_parallel as styles

    if dual_pipe_v or use_deepep:
        raise ValueError(
            "experts are dealt by torch's all-to-all only; leave dual_pipe_v and use_deepep off, "
            "and set parallelism.expert_parallel_comm_backend = 'standard'"
        )
    hidden_dims = TENSOR_PARALLEL_PLAN["layers.*.moe.experts"]
    for moe in (block.moe for block in model.layers.values() if block.moe_enabled):
        if ep_mesh is None:
            parallelize_module(moe.experts, tp_mesh, styles.TensorParallel(hidden_dims))
        elif etp_mesh is not None:
            style = styles.ExpertTensorParallel(hidden_dims)
            parallelize_module(moe.experts, ep_etp_mesh, style)
        else:
            parallelize_module(moe.experts, ep_mesh, styles.ExpertParallel())
            if tp_mesh is not None:
                parallelize_module(moe.reorderer, tp_mesh, styles.ReordererSequenceParallel())


# ---- activation checkpointing, compile ----


def _ops_saved_by_selective_checkpointing(compile_blocks: bool) -> set[Any]:
    """Outputs that are kept in "op" mode: those that cost more to compute than to store."""
    ops = torch.ops
    saved: set[Any] = {
        ops.aten.mm.default,
        ops.aten.addmm.default,  # of a Linear with a bias
        ops.aten._scaled_mm.default,  # of a Linear in 8 bits
        ops.aten._scaled_mm_v2.default,
        ops.aten._grouped_mm.default,
        ops.aten._scaled_grouped_mm.default,
        ops.aten._scaled_grouped_mm_v2.default,
        ops.torchtitan.grouped_mm.default,
        ops.aten.max.default,  # scaling factors of low-precision matmuls
        ops.aten._scaled_dot_product_efficient_attention.default,
        ops.aten._scaled_dot_product_flash_attention.default,
        ops.aten._scaled_dot_product_cudnn_attention.default,
        ops.aten._scaled_dot_product_attention_math.default,
        ops.aten._scaled_dot_product_fused_attention_overrideable.default,
        ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        ops.torchtitan.document_attention.default,
        ops._c10d_functional.reduce_scatter_tensor.default,
        ops._c10d_functional.all_to_all_single.default,
        torch._higher_order_ops.flex_attention,
    }
    if not compile_blocks:
        # Flex attention compiled by itself is one such region. Inside a compiled block there is
        # none, and dynamo cannot trace a policy that mentions it.
        saved.add(torch._higher_order_ops.inductor_compiled_code)
    if get_device_type() != "cpu":
        from torch.nn.attention import varlen  # noqa: F401 (registers operators; loads inductor)

        saved.add(ops.torch_attn._varlen_attn.default)
    return saved


def find_save_list(name: str) -> frozenset[Any]:
    """The `__getattr__` of every family's `infra.parallelize`, for `_op_sac_save_list`.

    Read-only: changing it would not change what "op" mode saves.
    """
    if name != "_op_sac_save_list":
        raise AttributeError(f"infra.parallelize has no attribute {name!r}")
    return frozenset(_ops_saved_by_selective_checkpointing(compile_blocks=False))


def apply_compile(model: nn.Module, compile_config: Compile, ep_enabled: bool = False) -> None:
    """Compile each block in place; blocks of one shape share the compiled code.

    Blocks whose experts wait for the device to know how many tokens they get, under expert
    parallelism or in a loop, are compiled in pieces around that. A second call does nothing.
    """
    # Blocks share one budget of variants: kinds of layers, static and dynamic shapes, with and
    # without gradients, shares of context parallelism. With fullgraph, one too many is an error.
    dynamo = torch._dynamo.config
    host.change_attribute(dynamo, "recompile_limit", max(dynamo.recompile_limit, 64))
    options: dict[str, Any] = {"backend": compile_config.backend, "fullgraph": True}
    for name, block in model.layers.named_children():
        if isinstance(block, torch._dynamo.OptimizedModule):
            continue
        moe = block.moe if getattr(block, "moe_enabled", False) else None
        if moe is None or (moe.experts.use_grouped_mm and not ep_enabled):
            model.layers.register_module(name, torch.compile(block, **options))
            continue
        for piece in (block.attention, moe.router, moe.shared_experts):  # norms: one kernel anyway
            if piece is not None and piece._compiled_call_impl is None:
                piece.compile(**options)
        if moe.experts.use_grouped_mm:
            moe.experts.compile_products(**options)
    logger.info("compiling each block with backend %r", compile_config.backend)


# ---- data parallelism ----


def _apply_data_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, compile_blocks: bool
) -> None:
    from torchtitan.distributed.fsdp import apply_ddp, apply_fsdp  # as in apply_tp

    training = job_config.training
    replicates = parallel_dims.dp_replicate_enabled
    if parallel_dims.uses_fsdp:
        expert_axes = ["dp_replicate", "efsdp"] if replicates else ["efsdp"]
        apply_fsdp(
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
    elif replicates and not parallel_dims.pp_enabled:  # a pipeline's schedule sums over replicas
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=compile_blocks)
