"""Settings that are changed, and that nothing reads under the rest of the config."""

from collections.abc import Callable

from torchtitan.config.checks.common import value_of
from torchtitan.config.checks.values import settings_of
from torchtitan.config.job_config import JobConfig
from torchtitan.tools.logging import logger


def _reads_chats(config: JobConfig) -> bool:
    names = [config.training.dataset, config.validation.dataset]
    names += [part.dataset for part in config.training.mixture]
    return "chat" in names


# Section, keys in it ("*": all), what they need, and whether that is there; None: what they need is a key,
# which must not be false.
_NEEDS: list[tuple[str, str, str, Callable[[JobConfig], bool] | None]] = [
    (
        "profiling",
        "profile_freq",
        "enable_profiling or enable_memory_snapshot",
        lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
    ),
    (
        "profiling",
        "save_traces_folder profiler_active profiler_warmup",
        "profiling.enable_profiling",
        None,
    ),
    ("profiling", "save_memory_snapshot_folder", "profiling.enable_memory_snapshot", None),
    (
        "metrics",
        "save_tb_folder",
        "enable_tensorboard or enable_wandb",
        lambda c: c.metrics.enable_tensorboard or c.metrics.enable_wandb,
    ),
    ("metrics", "save_jsonl_file", "metrics.enable_jsonl", None),
    (
        "optimizer",
        "implementation",
        'state_dtype = None, and another name than "Muon"',
        lambda c: c.optimizer.state_dtype is None and c.optimizer.name != "Muon",
    ),
    ("lr_scheduler", "step_offset init_lr_factor", "lr_scheduler.warmup_steps", None),
    (
        "lr_scheduler",
        "decay_type min_lr_factor",
        "decay_ratio above 0",
        lambda c: c.lr_scheduler.decay_ratio != 0,
    ),
    ("training", "data_seed", "training.shuffle", None),
    ("training", "dataset", "no [[training.mixture]]", lambda c: not c.training.mixture),
    ("training", "chat_keys too_long", 'a dataset = "chat"', _reads_chats),
    *(
        (
            f"{name}.dataloader",
            "persistent_workers prefetch_factor",
            f"{name}.dataloader.num_workers",
            None,
        )
        for name in ("training", "validation")
    ),
    *(
        (
            "parallelism",
            keys,
            f"{degree} above 1",
            lambda c, d=degree: getattr(c.parallelism, d) > 1,
        )
        for degree, keys in (
            ("tensor_parallel_degree", "disable_loss_parallel enable_async_tensor_parallel"),
            (
                "context_parallel_degree",
                "context_parallel_load_balancer context_parallel_rotate_method",
            ),
            (
                "expert_parallel_degree",
                "expert_tensor_parallel_degree expert_parallel_comm_backend",
            ),
            (
                "pipeline_parallel_degree",
                "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
                "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage "
                "pipeline_parallel_schedule pipeline_parallel_schedule_csv "
                "pipeline_parallel_microbatch_size",
            ),
        )
    ),
    (
        "parallelism",
        "pipeline_parallel_expert_parallel_overlap",
        "another version",
        lambda c: False,
    ),
    (
        "checkpoint",
        "enable_ft_dataloader_checkpoints folder interval last_save_model_only last_save_in_hf "
        "export_dtype async_mode keep_latest_k load_step enable_first_step_checkpoint load_only",
        "checkpoint.enable",
        None,
    ),
    (
        "checkpoint",
        "exclude_from_loading verify_on_load",
        "enable, initial_load_path or initial_load_in_hf",
        lambda c: bool(
            c.checkpoint.enable or c.checkpoint.initial_load_path or c.checkpoint.initial_load_in_hf
        ),
    ),
    ("checkpoint", "initial_load_model_only", "checkpoint.initial_load_path", None),
    ("checkpoint", "export_dtype", "checkpoint.last_save_model_only", None),
    *(
        (
            "activation_checkpoint",
            keys,
            needed,
            lambda c, m=modes: c.activation_checkpoint.mode in m,
        )
        for keys, needed, modes in (
            (
                "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns",
                'mode = "selective"',
                ("selective",),
            ),
            (
                "memory_budget visualize_memory_budget_pareto",
                'mode = "memory_budget"',
                ("memory_budget",),
            ),
            (
                "early_stop preserve_rng_state determinism_check debug",
                'mode = "selective" or "full"',
                ("selective", "full"),
            ),
        )
    ),
    (
        "activation_checkpoint",
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        'selective_ac_option = "op"',
        lambda c: c.activation_checkpoint.selective_ac_option == "op",
    ),
    ("compile", "components backend", "compile.enable", None),
    *(
        (name, "*", f'model.converters with "{name}"', lambda c, n=name: n in c.model.converters)
        for kind in ("linear", "grouped_mm")
        for name in (f"quantize.{kind}.float8", f"quantize.{kind}.mx")
    ),
    ("comm", "save_traces_folder save_traces_file_prefix", "comm.trace_buf_size", None),
    ("memory_estimation", "disable_fake_mode", "memory_estimation.enable", None),
    ("fault_tolerance", "*", "fault_tolerance.enable", None),
    ("validation", "*", "validation.enable", None),
    ("debug", "deterministic_warn_only", "debug.deterministic", None),
]


def without_effect(job_config: JobConfig) -> dict[str, str]:
    """Return key -> what it needs, of each setting that is not its default, and is not read."""
    defaults = {key: value for key, value, _ in settings_of(JobConfig())}
    settings = settings_of(job_config)
    changed = [k for k, value, _ in settings if k in defaults and value != defaults[k]]
    unread: dict[str, str] = {}
    for section, names, needed, is_there in _NEEDS:
        if is_there(job_config) if is_there else value_of(job_config, needed):
            continue
        keys = {f"{section}.{name}" for name in names.split()}
        for key in changed:
            if key in keys or (names == "*" and key.startswith(f"{section}.")):
                unread.setdefault(key, needed)
    return unread


def tell_settings_without_effect(job_config: JobConfig) -> None:
    unread = without_effect(job_config)
    by_need = [
        f"{', '.join(key for key in unread if unread[key] == needed)} (without {needed})"
        for needed in dict.fromkeys(unread.values())
    ]
    if by_need:
        logger.info("settings that have no effect: %s", "; ".join(by_need))
