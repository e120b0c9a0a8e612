"""Rules about the device's kernels and compiler, which need the model and the mesh."""

from collections.abc import Iterator
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.tools.utils import get_device_type


def device_limits(job_config: JobConfig, parallel_dims: Any, model: Any) -> Iterator[str]:
    """Limits of the device's kernels and compiler. model: the built `torchtitan.models.decoder` model."""
    attn_type = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    training, ac = job_config.training, job_config.activation_checkpoint
    if get_device_type() == "cpu":
        # A bug of torch 2.13's compiler on the CPU: backward gets sdpa's random number generator state in
        # place of the mesh of a sharded parameter.
        by_layers = ac.mode == "selective" and ac.selective_ac_option != "op"
        splits_sdpa = parallel_dims.tp_enabled and attn_type == "sdpa"
        compiles = job_config.compile.applies_to("model")
        if compiles and splits_sdpa and (ac.mode == "full" or by_layers):
            yield (
                f"compile.enable with activation_checkpoint.mode = {ac.mode!r} and "
                f"selective_ac_option = {ac.selective_ac_option!r} does not work on the CPU with "
                f"parallelism.tensor_parallel_degree above 1 and attn_type 'sdpa'; set "
                f"activation_checkpoint.mode = 'selective' with selective_ac_option = 'op'"
            )
        return
    if training.enable_cpu_offload and not parallel_dims.uses_fsdp:
        # Parameters would be created on the host, and nothing would move them to the device.
        yield (
            "training.enable_cpu_offload is done by FSDP, which this layout does not use because "
            "parallelism.data_parallel_shard_degree * context_parallel_degree is 1; raise "
            "data_parallel_shard_degree, or turn enable_cpu_offload off"
        )
    # Limits of the accelerator's "varlen" kernel, which context parallelism with "allgather" uses for
    # every model.attn_type. Our own kernel for the CPU has no such limits.
    method = job_config.parallelism.context_parallel_rotate_method
    if parallel_dims.cp_enabled and method == "allgather":
        setting = "parallelism.context_parallel_rotate_method = 'allgather'"
        remedy = "the method to 'alltoall', and model.attn_type to 'flex' if it is 'varlen'"
    elif attn_type == "varlen":
        setting, remedy = "model.attn_type = 'varlen'", "the type to 'flex'"
    else:
        return
    if any(getattr(module, "needs_log_sum_exp", False) for module in model.modules()):
        yield (
            f"{setting} gives no gradient through the log-sum-exp of the scores on an "
            f"accelerator, and model {job_config.model.name!r} needs it; set {remedy}"
        )
    # Without FSDP and autocast (see `maybe_enable_amp`) the kernel gets tensors of training.dtype.
    key, dtype = "training.mixed_precision_param", training.mixed_precision_param
    is_split = parallel_dims.tp_enabled or parallel_dims.pp_enabled
    if not parallel_dims.uses_fsdp and (is_split or training.dtype == "bfloat16"):
        key, dtype = "training.dtype", training.dtype
    if dtype == "float32":
        yield (
            f"{setting} needs 16-bit numbers on an accelerator, because its attention kernel takes "
            f"no other type, got {key} = {dtype!r}; set {key} to 'bfloat16', or {remedy}"
        )
