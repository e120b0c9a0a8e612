"""Names of DeepEP's kernels, which are not available."""

from torchtitan.tools.lazy_names import not_available

dispatch_tokens = combine_tokens = sync_combine = DispatchState = not_available(
    "there are no DeepEP kernels here, tokens travel to experts by torch's all-to-all; set "
    "parallelism.expert_parallel_comm_backend = 'standard', use ExpertParallel() for the experts, and "
    "build MoE(moe_args, dim, hidden_dim)"
)
