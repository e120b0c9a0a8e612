"""What is rehearsed: layouts, and where a step of each may wait for the device."""

TP, CP = "--parallelism.tensor_parallel_degree=", "--parallelism.context_parallel_degree="
EP, ETP = "--parallelism.expert_parallel_degree=", "--parallelism.expert_tensor_parallel_degree="
PP, HSDP = (
    "--parallelism.pipeline_parallel_degree=",
    "--parallelism.data_parallel_replicate_degree=",
)
ROTATE = "--parallelism.context_parallel_rotate_method="
FLEX = "--model.attn_type=flex --model.attn_mask_type=block_causal"
VARLEN = "--model.attn_type=varlen --model.attn_mask_type=block_causal"
FLOAT8 = (
    "--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns=output"
    " --quantize.linear.float8.enable_fsdp_float8_all_gather"
    " --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
)
MOE = "--model.flavor=debugmodel_moe_small"
COMPILE = "--compile.enable --compile.backend=aot_eager"
FULL = "--activation_checkpoint.mode=full"
OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"

# name -> (ranks, flags, the rank to be, 0 unless given); the first word is the family
CASES = {
    "llama3": (1, ""),
    "llama3 flex": (1, FLEX),
    "llama3 varlen": (1, VARLEN),
    "llama3 fsdp": (8, ""),
    "llama3 fsdp of one": (1, "--parallelism.always_fsdp=True"),
    "llama3 fsdp registered": (8, "--parallelism.fsdp_register_buffers"),
    "llama3 fsdp within 4": (8, "--parallelism.fsdp_reshard_after_forward=4"),
    "llama3 offload": (2, "--training.enable_cpu_offload"),
    "llama3 full": (2, FULL),
    "llama3 op": (2, OP),
    "llama3 op flex": (2, f"{OP} {FLEX}"),
    "llama3 op flex compile": (2, f"{OP} {FLEX} {COMPILE}"),
    "llama3 op varlen compile": (2, f"{OP} {VARLEN} {COMPILE}"),
    "llama3 hsdp flex": (8, f"{HSDP}2 {FLEX}"),
    "llama3 tp": (8, f"{TP}2"),
    "llama3 hsdp tp": (8, f"{HSDP}2 {TP}2"),
    "llama3 float8 tp fsdp full compile": (
        8,  # as the 405B preset
        f"{FLOAT8} {TP}2 {FULL} {COMPILE} --parallelism.enable_async_tensor_parallel",
    ),
    "llama3 tp full compile": (2, f"{TP}2 {FULL} {COMPILE}"),
    "llama3 cp allgather": (4, f"{CP}2"),
    "llama3 cp allgather varlen": (4, f"{CP}2 {VARLEN}"),
    "llama3 cp allgather varlen op compile": (4, f"{CP}2 {VARLEN} {OP} {COMPILE}"),
    "llama3 cp alltoall flex compile": (4, f"{CP}2 {ROTATE}alltoall {FLEX} {COMPILE}"),
    "llama3 pp": (4, f"{PP}2"),
    "llama3 pp last varlen": (4, f"{PP}2 {VARLEN}", 3),
    "qwen3 fsdp": (8, ""),
    "qwen3 moe compile": (2, f"{MOE} {COMPILE}"),
    "qwen3 moe ep": (8, f"{MOE} {EP}4"),
    "qwen3 moe ep full compile": (4, f"{MOE} {EP}2 {FULL} {COMPILE}"),
    "qwen3 moe ep pp": (
        8,
        f"{MOE} {EP}2 {PP}2 --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
    ),
    "qwen3 moe ep op compile": (4, f"{MOE} {EP}2 {OP} {COMPILE}"),
    "deepseek_v3 compile": (1, COMPILE),
    "deepseek_v3 ep op flex": (8, f"{EP}4 {OP} {FLEX}"),
    "deepseek_v3 tp ep varlen": (8, f"{TP}2 {EP}2 {VARLEN}"),
    "llama4 flex compile": (1, f"{FLEX} {COMPILE}"),
    "llama4 cp varlen": (4, f"{CP}2 {VARLEN}"),
    "llama4 etp varlen": (8, f"{TP}2 {EP}2 {ETP}2 {VARLEN}"),
    "gpt_oss compile": (1, COMPILE),
    "gpt_oss op flex": (8, f"{OP} {FLEX}"),
    "gpt_oss tp ep": (8, f"{TP}2 {EP}2"),
}

# name -> part -> where the host waits, and how often. Nothing that is not here may wait.
ALLOWED: dict[str, dict[str, dict[str, int]]] = {}
