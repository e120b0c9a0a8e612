"""The plan that splits every decoder's parameters over a mesh: tensor and expert parallelism."""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import expert_parallel as styles
from torchtitan.distributed.tensor_parallel import distribute_modules, maybe_enable_async_tp
from torchtitan.tools.logging import logger

# Parameter -> the dimension it is split along; None: every rank holds the whole parameter.
# _OUTPUTS: each rank computes some outputs of a Linear. _INPUTS: each rank sums over some inputs.
# _ALIKE: each rank computes the whole Linear.
_OUTPUTS = {"weight": 0, "bias": 0, "lora_a": None, "lora_b": 0}
_INPUTS = {"weight": 1, "bias": None, "lora_a": 1, "lora_b": None}
_ALIKE = {"weight": None, "bias": None, "lora_a": None, "lora_b": None}

_BLOCK, _ATTENTION, _MOE = "layers.*.", "layers.*.attention.", "layers.*.moe."


def _rows(prefix: str, modules: str, split: dict[str, int | None]) -> dict:
    return {prefix + module: split for module in modules.split()}


TENSOR_PARALLEL_PLAN: dict[str, dict[str, int | None]] = {
    **_rows("", "tok_embeddings output", _OUTPUTS),
    **_rows("", "norm score", _ALIKE),
    **_rows(_BLOCK, "attention_norm ffn_norm attention_post_norm ffn_post_norm", _ALIKE),
    # attention, split by heads
    "layers.*.attention": {"sinks": 0, "conv_q": 0, "conv_k": 0, "conv_v": 0},
    **_rows(_ATTENTION, "wq wk wv wg", _OUTPUTS),
    **_rows(_ATTENTION, "wo", _INPUTS),
    **_rows(_ATTENTION, "q_norm k_norm", _ALIKE),
    # linear attention, split by key heads
    **_rows(_ATTENTION, "wz wb wa", _OUTPUTS),
    **_rows(_ATTENTION, "norm", _ALIKE),
    "layers.*.attention.decay": {"A_log": 0, "dt_bias": 0},
    # latents that all heads share
    **_rows(_ATTENTION, "wq_a wkv_a kv_norm", _ALIKE),
    **_rows(_ATTENTION, "wq_b wkv_b", _OUTPUTS),
    # feed-forward and experts, split by hidden units
    **_rows(_BLOCK, "feed_forward.w1 feed_forward.w3", _OUTPUTS),
    **_rows(_BLOCK, "feed_forward.w2", _INPUTS),
    **_rows(_MOE, "router.gate shared_gate", _ALIKE),
    **_rows(_MOE, "shared_experts.w1 shared_experts.w3", _OUTPUTS),
    **_rows(_MOE, "shared_experts.w2", _INPUTS),
    "layers.*.moe.experts": {
        **{"w1": 1, "w1_lora_a": None, "w1_lora_b": 1},
        **{"w3": 1, "w3_lora_a": None, "w3_lora_b": 1},
        **{"w2": 2, "w2_lora_a": 2, "w2_lora_b": None},
        **{"mlp1_weight": 1, "mlp1_bias": 1, "mlp2_weight": 2, "mlp2_bias": None},
    },
}


_EXPERTS = TENSOR_PARALLEL_PLAN["layers.*.moe.experts"]
GptossTensorParallel = partial(styles.TensorParallel, _EXPERTS)  # names of 0.2.x's gpt-oss
GptossExpertTensorParallel = partial(styles.ExpertTensorParallel, _EXPERTS)


def split_parameters(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Apply the config's expert and tensor parallelism in place: experts first, then everything else."""
    if parallel_dims.ep_enabled:
        apply_moe_ep_tp(
            model,
            tp_mesh=parallel_dims.get_optional_mesh("tp"),
            ep_mesh=parallel_dims.get_mesh("ep"),
            etp_mesh=parallel_dims.get_optional_mesh("etp"),
            ep_etp_mesh=parallel_dims.get_optional_mesh(["ep", "etp"]),
        )
        logger.info(
            "expert parallelism: experts are distributed over %d ranks, each expert is split over %d ranks",
            parallel_dims.ep,
            parallel_dims.etp,
        )
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        maybe_enable_async_tp(job_config, mesh)
        recipe = job_config.quantize.linear.float8.recipe_name
        apply_tp(
            model,
            mesh,
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            # LoRA adapters need the hidden states in high precision, so with LoRA don't gather them in float8.
            enable_float8_tensorwise_tp="quantize.linear.float8" in job_config.model.converters
            and "lora" not in job_config.model.converters
            and recipe in (None, "tensorwise"),
            enable_async_tp=job_config.parallelism.enable_async_tensor_parallel,
        )


def apply_tp(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    loss_parallel: bool,
    enable_float8_tensorwise_tp: bool = False,
    enable_async_tp: bool = False,
    cp_enabled: bool = False,
) -> None:
    """Split the decoder over a 1-D mesh in place, by `TENSOR_PARALLEL_PLAN`.

    loss_parallel: logits stay split along the vocabulary, as a DTensor.
    enable_float8_tensorwise_tp: gather hidden states and gradients in float8, in blocks where
        torchao has made all linear layers float8 with one scale per tensor.
    enable_async_tp: write the blocks' collectives in the form that the compiler's pass recognises;
        `maybe_enable_async_tp` turns that pass on.
    cp_enabled: ignored.
    """
    distribute_modules(
        model,
        tp_mesh,
        TENSOR_PARALLEL_PLAN,
        loss_parallel,
        overlap=enable_async_tp,
        float8_gather=enable_float8_tensorwise_tp,
    )


apply_non_moe_tp = apply_tp  # the name in families with experts of torchtitan 0.2.x


def apply_moe_ep_tp(
    model: nn.Module,
    tp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    etp_mesh: DeviceMesh | None,
    ep_etp_mesh: DeviceMesh | None,
    dual_pipe_v: bool = False,
    use_deepep: bool = False,
) -> None:
    """Distribute the experts of every block over ranks, or split each expert, or both; in place.

    tp_mesh, ep_mesh: 1-D, or None if the parallelism is off. If both are given and `etp_mesh`
        is None, each rank of `tp_mesh` sends a share of the tokens to the experts.
    ep_etp_mesh: the mesh [ep, etp], if experts are also split by hidden units.
    Call it before `apply_tp`. Raises ValueError for DualPipe and DeepEP.
    """
    if dual_pipe_v or use_deepep:
        raise ValueError(
            "tokens reach their experts by torch's all-to-all only; leave dual_pipe_v and use_deepep "
            "off, and set parallelism.expert_parallel_comm_backend = 'standard'"
        )
    for moe in (block.moe for block in model.layers.values() if block.moe_enabled):
        if ep_mesh is None:
            parallelize_module(moe.experts, tp_mesh, styles.TensorParallel(_EXPERTS))
        elif etp_mesh is not None:
            parallelize_module(moe.experts, ep_etp_mesh, styles.ExpertTensorParallel(_EXPERTS))
        else:
            parallelize_module(moe.experts, ep_mesh, styles.ExpertParallel())
            if tp_mesh is not None:
                parallelize_module(moe.reorderer, tp_mesh, styles.ReordererSequenceParallel())
