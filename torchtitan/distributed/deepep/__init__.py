"""Stand-ins for torchtitan 0.2.x's DeepEP functions; calling a stand-in raises NotImplementedError."""

from torchtitan.tools.lazy_names import not_available

dispatch_tokens = combine_tokens = sync_combine = DispatchState = not_available(
    "DeepEP's kernels are not available, torch's all-to-all sends tokens to experts instead; set "
    "parallelism.expert_parallel_comm_backend = 'standard', use ExpertParallel() for the experts, and "
    "build MoE(moe_args, dim, hidden_dim)"
)
