"""What is rehearsed: layouts, and where a step of each may wait for the device."""

TP, CP = "--parallelism.tensor_parallel_degree=", "--parallelism.context_parallel_degree="
EP, ETP = "--parallelism.expert_parallel_degree=", "--parallelism.expert_tensor_parallel_degree="
PP = "--parallelism.pipeline_parallel_degree="
HSDP = "--parallelism.data_parallel_replicate_degree="
ZERO_BUBBLE = "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"
ROTATE = "--parallelism.context_parallel_rotate_method="
FLEX = "--model.attn_type=flex --model.attn_mask_type=block_causal"
VARLEN = "--model.attn_type=varlen --model.attn_mask_type=block_causal"
FLOAT8 = (
    "--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns=output"
    " --quantize.linear.float8.enable_fsdp_float8_all_gather"
    " --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
)
LORA = "--model.converters=lora"
FLOAT8_LORA = FLOAT8.replace("linear.float8 ", "linear.float8,lora ", 1)
MUON = "--optimizer.name=Muon"
MOE = "--model.flavor=debugmodel_moe_small"
COMPILE = "--compile.enable --compile.backend=aot_eager"
FULL = "--activation_checkpoint.mode=full"
OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"

# name -> (ranks, flags, the rank to be, 0 unless given); the first word is the family
CASES = {
    "llama3": (1, ""),
    "llama3 varlen": (1, VARLEN),
    "llama3 fsdp": (8, ""),
    "llama3 fsdp registered": (8, "--parallelism.fsdp_register_buffers"),
    "llama3 offload": (2, "--training.enable_cpu_offload"),
    "llama3 op flex": (2, f"{OP} {FLEX}"),
    "llama3 op flex compile": (2, f"{OP} {FLEX} {COMPILE}"),
    "llama3 op varlen compile": (2, f"{OP} {VARLEN} {COMPILE}"),
    "llama3 hsdp tp": (8, f"{HSDP}2 {TP}2"),
    "llama3 float8 tp fsdp full compile": (
        8,  # as the 405B preset
        f"{FLOAT8} {TP}2 {FULL} {COMPILE} --parallelism.enable_async_tensor_parallel",
    ),
    "llama3 cp allgather varlen": (4, f"{CP}2 {VARLEN}"),
    "llama3 cp allgather varlen op compile": (4, f"{CP}2 {VARLEN} {OP} {COMPILE}"),
    "llama3 cp alltoall flex compile": (4, f"{CP}2 {ROTATE}alltoall {FLEX} {COMPILE}"),
    "llama3 pp": (4, f"{PP}2"),
    "llama3 pp last varlen": (4, f"{PP}2 {VARLEN}", 3),
    "qwen3 moe compile": (2, f"{MOE} {COMPILE}"),
    "qwen3 moe ep": (8, f"{MOE} {EP}4"),
    "qwen3 moe ep full compile": (4, f"{MOE} {EP}2 {FULL} {COMPILE}"),
    "qwen3 moe ep pp": (8, f"{MOE} {EP}2 {PP}2 {ZERO_BUBBLE}"),
    "qwen3 moe ep op compile": (4, f"{MOE} {EP}2 {OP} {COMPILE}"),
    "deepseek_v3 compile": (1, COMPILE),
    "deepseek_v3 ep op flex": (8, f"{EP}4 {OP} {FLEX}"),
    "deepseek_v3 tp ep varlen": (8, f"{TP}2 {EP}2 {VARLEN}"),
    "llama4 cp varlen": (4, f"{CP}2 {VARLEN}"),
    "llama4 etp varlen": (8, f"{TP}2 {EP}2 {ETP}2 {VARLEN}"),
    "llama3 lora hsdp tp op compile": (8, f"{LORA} {HSDP}2 {TP}2 {OP} {COMPILE}"),
    "llama3 lora float8 tp fsdp full compile": (8, f"{FLOAT8_LORA} {TP}2 {FULL} {COMPILE}"),
    "qwen3 lora moe ep pp": (8, f"{LORA} --lora.dropout=0.1 {MOE} {EP}2 {PP}2 {ZERO_BUBBLE}"),
    "llama3 muon hsdp tp": (8, f"{MUON} --optimizer.state_dtype=bfloat16 {HSDP}2 {TP}2"),
    "qwen3 muon moe ep offload": (8, f"{MUON} {MOE} {EP}4 --training.enable_cpu_offload"),
    "gpt_oss op flex": (8, f"{OP} {FLEX}"),
    "gpt_oss tp ep": (8, f"{TP}2 {EP}2"),
}

# What CI runs; the others are marked slow.
QUICK = {
    "llama3 offload",
    "llama3 op flex",
    "llama3 cp allgather varlen",
    "llama3 pp last varlen",
    "llama4 etp varlen",
    "checkpoint pinned",
    "to host and back",
    "weight stream",
    "adapters of two models",
    "rl step with critic",
}

# ---- where the host may wait, and how often; nothing that is not here may ----

Waits = dict[str, int]

# The norm of the step before, when this step is queued.
NORM = {"event.synchronize, late in tools/host_copy.py read": 1}


def _norm_and_counts(n_layers: int) -> dict[str, Waits]:
    """Also, once per layer with experts, how many tokens go to and come from each rank."""
    counts = "event.synchronize, late in distributed/expert_parallel.py wait_for_splits"
    return {"step": {**NORM, counts: n_layers}}


# What is logged is read: loss twice, norm, and tokens seen, which are counted on the host.
_LOGGED = {
    "aten::_local_scalar_dense in trainer.py _log_step": 1,
    "aten::_local_scalar_dense in distributed/utils.py _dist_reduce": 3,
    "copy of a number in trainer.py _log_step": 1,
}
_LOGGED_AFTER_SAVE = {"logged step": _LOGGED | NORM}  # which has looked at the step before
_LOGGED_AND_BEFORE = {"logged step": _LOGGED | {next(iter(NORM)): 2}}
# Blocking copies, one per tensor, between the writes of two threads.
_WRITE = {
    "torch.cuda.synchronize in checkpoint/folder.py write_data": 1,
    "copy to host in checkpoint/folder.py write": 21,
}
_STAGE = "copy to host in checkpoint/saver.py stage"
# name -> part -> waits; a case that is missing has the norm alone
ALLOWED: dict[str, dict[str, Waits]] = {name: {"step": NORM} for name in CASES} | {
    # Gradients and weights live in host memory, where the norm is taken.
    "llama3 offload": {
        "step": {
            "event.synchronize in backward": 1,
            "event.synchronize, late in backward": 20,
            "copy of a number in step/update.py apply": 1,
        }
    },
    # Muon cannot skip an update on the device.
    "llama3 muon hsdp tp": {"step": {"event.synchronize, late in tools/host_copy.py read": 2}},
    "qwen3 muon moe ep offload": {
        "step": {
            "event.synchronize, late in distributed/expert_parallel.py wait_for_splits": 4,
            "event.synchronize in backward": 1,
            "event.synchronize, late in backward": 50,
            "copy of a number in step/update.py apply": 1,
            "copy of pageable in optim/muon.py gather": 32,
            "copy to host in optim/muon.py _update_together": 32,
        }
    },
    "qwen3 moe ep": _norm_and_counts(4),
    "qwen3 moe ep full compile": _norm_and_counts(4),
    "qwen3 moe ep pp": _norm_and_counts(8),  # 2 layers here, 4 microbatches
    "qwen3 lora moe ep pp": _norm_and_counts(8),
    "qwen3 moe ep op compile": _norm_and_counts(4),
    "deepseek_v3 ep op flex": _norm_and_counts(2),
    "deepseek_v3 tp ep varlen": _norm_and_counts(2),
    "llama4 etp varlen": _norm_and_counts(1),
    "gpt_oss tp ep": _norm_and_counts(2),
    "trainer accumulates": _LOGGED_AND_BEFORE,
    "trainer validates": _LOGGED_AND_BEFORE,
    # Blocking copies, one per tensor, before training goes on: that is what this mode is.
    "checkpoint async": _LOGGED_AFTER_SAVE
    | {"save 1": {_STAGE: 147}, "save 2": {_STAGE: 84}, "save 3": _WRITE},
    "checkpoint pinned": {"save 3": _WRITE} | _LOGGED_AFTER_SAVE,
    # How many microbatches other ranks have, while one's own run.
    "scores lists": dict.fromkeys(("forward_step", "forward_backward_step", "optim_step"), NORM),
    "to host and back": {"to host": {"stream.synchronize in optim/offload.py _pinned_copies": 1}},
    # Whether the logits are finite.
    "generation": {
        family: {"aten::_local_scalar_dense in generation/sampling.py stream": 2}
        for family in ("llama3", "deepseek_v3", "gpt_oss")
    },
    "weight stream": dict.fromkeys(
        ("whole", "sharded"), {"copy to host in checkpoint/stream.py hexdigest": 1}
    ),
    # A rollout asks for each token whether rows go on, a push whether any rank failed; both engines say
    # what they did, and values come to the host.
    "rl step with critic": {
        "two steps": {
            "copy of a number in rl/weight_sync.py push_weights": 3,
            "aten::_local_scalar_dense in rl/weight_sync.py push_weights": 3,
            "aten::_local_scalar_dense in rl/learner.py optim_step": 4,
            "copy of pageable in generation/kv_cache.py __call__": 2,
            "copy of pageable in generation/kv_cache.py put_rows": 2,
            "copy of pageable in rl/decoding.py _read_prompts": 2,
            "copy of pageable in rl/decoding.py continue_prompts": 2,
            "copy of pageable in rl/decoding.py _draw": 2,
            "copy to host in rl/decoding.py continue_prompts": 2,
            "copy to host in rl/decoding.py _draw": 2,
            "copy to host in rl/learner.py forward_backward": 4,
            "copy to host in rl/learner.py _per_sample": 2,
            "event.synchronize, late in tools/host_copy.py read": 8,
        }
    },
}
