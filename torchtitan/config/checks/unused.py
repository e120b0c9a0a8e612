"""Settings that differ from their defaults but have no effect because of another setting."""

import re

from torchtitan.config.fields import settings_of
from torchtitan.config.job_config import JobConfig
from torchtitan.tools.logging import logger

# Lines `section: keys if condition`. The keys ("*" for all) have an effect only if the condition is true, a
# Python expression of the config's sections and `datasets`, the datasets' names. The log shows the condition.
_READ_IF = """
profiling: profile_freq if profiling.enable_profiling or profiling.enable_memory_snapshot
profiling: save_traces_folder profiler_active profiler_warmup if profiling.enable_profiling
profiling: save_memory_snapshot_folder if profiling.enable_memory_snapshot
metrics: save_tb_folder if metrics.enable_tensorboard or metrics.enable_wandb
metrics: save_jsonl_file if metrics.enable_jsonl
optimizer: implementation if optimizer.state_dtype is None
optimizer: implementation if optimizer.name != 'Muon'
lr_scheduler: step_offset init_lr_factor if lr_scheduler.warmup_steps
lr_scheduler: decay_type min_lr_factor if lr_scheduler.decay_ratio != 0
training: data_seed if training.shuffle
training: dataset if not training.mixture
training: chat_keys too_long if 'chat' in datasets or 'preference' in datasets
training.dataloader: persistent_workers prefetch_factor if training.dataloader.num_workers
validation.dataloader: persistent_workers prefetch_factor if validation.dataloader.num_workers
parallelism: disable_loss_parallel enable_async_tensor_parallel if
    parallelism.tensor_parallel_degree > 1
parallelism: context_parallel_load_balancer context_parallel_rotate_method if
    parallelism.context_parallel_degree > 1
parallelism: expert_tensor_parallel_degree expert_parallel_comm_backend if
    parallelism.expert_parallel_degree > 1
parallelism: module_fqns_per_model_part pipeline_parallel_first_stage_less_layers
    pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
    pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size if
    parallelism.pipeline_parallel_degree > 1
parallelism: pipeline_parallel_expert_parallel_overlap if False
checkpoint: enable_ft_dataloader_checkpoints folder interval last_save_model_only last_save_in_hf
    export_dtype async_mode keep_latest_k load_step enable_first_step_checkpoint load_only if
    checkpoint.enable
checkpoint: exclude_from_loading verify_on_load if checkpoint.enable or
    checkpoint.initial_load_path or checkpoint.initial_load_in_hf
checkpoint: initial_load_model_only if checkpoint.initial_load_path
checkpoint: export_dtype if checkpoint.last_save_model_only
activation_checkpoint: selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns if
    activation_checkpoint.mode == 'selective'
activation_checkpoint: memory_budget visualize_memory_budget_pareto if activation_checkpoint.mode
    == 'memory_budget'
activation_checkpoint: early_stop preserve_rng_state determinism_check debug if
    activation_checkpoint.mode in ('selective', 'full')
activation_checkpoint: per_op_sac_force_recompute_mm_shapes_by_fqns if
    activation_checkpoint.selective_ac_option == 'op'
compile: components backend if compile.enable
quantize.linear.float8: * if 'quantize.linear.float8' in model.converters
quantize.linear.mx: * if 'quantize.linear.mx' in model.converters
quantize.grouped_mm.float8: * if 'quantize.grouped_mm.float8' in model.converters
quantize.grouped_mm.mx: * if 'quantize.grouped_mm.mx' in model.converters
comm: save_traces_folder save_traces_file_prefix if comm.trace_buf_size
memory_estimation: disable_fake_mode if memory_estimation.enable
fault_tolerance: * if fault_tolerance.enable
validation: * if validation.enable
debug: deterministic_warn_only if debug.deterministic
"""


def without_effect(job_config: JobConfig) -> dict[str, str]:
    """Return key -> the unmet condition, for settings that differ from their defaults."""
    built_in = {setting.key for setting in settings_of(JobConfig())}
    changed = [x.key for x in settings_of(job_config) if x.key in built_in and x.value != x.default]
    training, validation = job_config.training, job_config.validation
    read = [training.dataset, validation.dataset, *(part.dataset for part in training.mixture)]
    names = vars(job_config) | {"datasets": read}
    unread: dict[str, str] = {}
    rows = re.findall(r"^(\S+): (.*?) if (.*)$", _READ_IF.replace("\n    ", " "), re.M)
    for section, keys, condition in rows:
        if not eval(condition, {"__builtins__": {}}, names):
            for key in changed:
                own = key.removeprefix(f"{section}.")
                if own != key and (keys == "*" or own in keys.split()):
                    unread.setdefault(key, condition)
    return unread


def tell_settings_without_effect(job_config: JobConfig) -> None:
    unread = without_effect(job_config)
    if unread:
        told = (f"{key} (read if {condition})" for key, condition in unread.items())
        logger.info(f"settings that have no effect: {'; '.join(told)}")
