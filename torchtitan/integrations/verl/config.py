"""Turns verl's settings into a `JobConfig`; errors name verl's fields."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import TorchtitanEngineConfig

from torchtitan.adapters.peft_config import read_config
from torchtitan.config import JobConfig
from torchtitan.config.checks.common import clash, one_of, refuse, value_of
from torchtitan.distributed.processes.ranks import num_ranks
from torchtitan.models.hf_config import from_hf_config
from torchtitan.optim.optimizer import build_optimizers
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger, warn_once

# Name of the flavor that `job_config_of` builds.
FLAVOR = "of_verl"
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")

# Key of `JobConfig` -> the field of verl's `TorchtitanEngineConfig` or `TorchtitanOptimizerConfig`.
_ENGINE_FIELDS = {
    "parallelism.data_parallel_replicate_degree": "data_parallel_replicate_size",
    "parallelism.data_parallel_shard_degree": "data_parallel_shard_size",
    "parallelism.tensor_parallel_degree": "tensor_parallel_size",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel_size",
    "parallelism.context_parallel_degree": "context_parallel_size",
    "parallelism.expert_parallel_degree": "expert_parallel_size",
    "parallelism.expert_tensor_parallel_degree": "expert_tensor_parallel_size",
    "parallelism.fsdp_reshard_after_forward": "reshard_after_forward",
    "model.attn_type": "attn_type",
    "activation_checkpoint.mode": "activation_checkpoint",
    "compile.enable": "use_torch_compile",
    "training.mixed_precision_param": "dtype",
    "training.enable_cpu_offload": "offload_policy",
    "debug.seed": "seed",
    "debug.deterministic": "full_determinism",
}
_OPTIM_FIELDS = {
    "optimizer.name": "name",
    "optimizer.lr": "lr",
    "optimizer.eps": "eps",
    "optimizer.weight_decay": "weight_decay",
    "training.max_norm": "clip_grad",
    "lr_scheduler.decay_type": "decay_type",
    "lr_scheduler.min_lr_factor": "min_lr_factor",
}
_LORA_FIELDS = {
    "lora.rank": "model.lora_rank",
    "lora.alpha": "model.lora_alpha",
    "lora.target_modules": "model.target_modules",
    "lora.adapter_path": "model.lora_adapter_path",
}
# Fields that have no effect in our engine.
_IGNORED = (
    "engine.forward_prefetch",
    "engine.use_orig_params",
    "model.use_liger",
    "model.enable_activation_offload",
    "checkpoint.async_save",
    "checkpoint.save_lora_only",
)


@dataclass
class EngineConfig(TorchtitanEngineConfig):
    """verl's settings of a torchtitan engine, plus the field `job` for any key of `JobConfig`.

    Set `engine._target_=torchtitan.integrations.verl.config.EngineConfig`, or
    `actor_rollout_ref.actor.torchtitan._target_=...` in PPO, to use this class.

    data_parallel_shard_size: -1 means world size / product of the other sizes.
    job: values for keys of `JobConfig`, which may be dotted or nested. They override verl's fields.
    share_prefixes: compute a prefix only once if several samples of a microbatch share it.
    """

    data_parallel_shard_size: int = -1
    job: dict[str, Any] = field(default_factory=dict)
    share_prefixes: bool = False


def job_config_of(
    engine_config: Any,
    optimizer_config: Any,
    model_config: Any,
    checkpoint_config: Any,
    model_type: str,
) -> tuple[JobConfig, TrainSpec]:
    """Return the job that verl's four configs describe, and the train spec of the model.

    engine_config: `TorchtitanEngineConfig`. optimizer_config: `TorchtitanOptimizerConfig`; None for
        forward only. model_config: `HFModelConfig`. checkpoint_config: `CheckpointConfig` or None.
    model_type: "language_model" or "value_model".
    Raises ConfigError for settings that cannot run, before anything is built.
    """
    refuse(
        _engine_problems(engine_config),
        _optimizer_problems(engine_config, optimizer_config),
        _model_problems(model_config, model_type),
        _checkpoint_problems(checkpoint_config),
    )
    configs = {"engine": engine_config, "model": model_config, "checkpoint": checkpoint_config}
    for key in _IGNORED:
        section, name = key.split(".")
        if value := getattr(configs[section], name, False):
            warn_once(logger, f"{key} = {value} has no effect in torchtitan's engine")
    match = from_hf_config(model_config.hf_config.to_dict())
    spec = dataclasses.replace(
        get_train_spec(match.family),
        model_args={FLAVOR: match.model_args},
        # `build_optimizers` adds no hook for load balancing, whose expert biases would make the trainer
        # choose other experts than a rollout with the same weights.
        build_optimizers_fn=build_optimizers,
    )
    job = JobConfig()
    job.job.description = f"verl {model_type} {model_config.local_path}"
    job.model.name, job.model.flavor = match.family, FLAVOR
    job.model.hf_assets_path = model_config.local_path
    job.model.attn_mask_type = "block_causal"
    job.model.value_head = model_type == "value_model"
    if getattr(model_config.hf_config, "vision_config", None) is not None:
        # Exports keep the vision weights.
        job.checkpoint.untrained_weights = "copy"
    if has_adapters(model_config):
        _set_adapters(job, model_config)
    job.activation_checkpoint.selective_ac_option = "op"
    for key, name in _ENGINE_FIELDS.items():
        _set(job, key, getattr(engine_config, name))
    # The initial length of the RoPE table; the model extends the table for longer samples.
    longest = match.model_args.max_seq_len
    job.training.seq_len = engine_config.max_seq_len or min(job.training.seq_len, longest)
    # verl multiplies losses by the data-parallel size and expects gradients averaged over these ranks.
    job.training.gradient_reduction = "mean"
    if optimizer_config is not None:
        _set_optimizer(job, optimizer_config)
    # A forward-only engine loads only weights.
    if not engine_config.forward_only:
        contents = getattr(checkpoint_config, "load_contents", CHECKPOINT_CONTENTS)
        left_out = [] if "optimizer" in contents else ["optimizer"]
        left_out += [] if "extra" in contents else ["lr_scheduler", "train_state"]
        job.checkpoint.exclude_from_loading = left_out
    for key, value in _leaves(getattr(engine_config, "job", {})):
        try:
            _set(job, key, value)
        except AttributeError:
            raise ConfigError(
                f"engine.job takes keys of torchtitan's JobConfig, such as "
                f"parallelism.pipeline_parallel_schedule, got {key!r}; correct or remove it"
            ) from None
    return job, spec


def has_adapters(model_config: Any) -> bool:
    """True if verl's `HFModelConfig` requests LoRA."""
    return model_config.lora_rank > 0 or model_config.lora_adapter_path is not None


def _set_adapters(job: JobConfig, config: Any) -> None:
    """Set `[lora]` from verl's fields, or from the config of the adapters in lora_adapter_path."""
    lora, path = job.lora, config.lora_adapter_path
    job.model.converters = [*job.model.converters, "lora"]
    lora.rank, lora.alpha = config.lora_rank, float(config.lora_alpha)
    targets = config.target_modules
    lora.target_modules = [targets] if isinstance(targets, str) else list(targets)
    if path is None:
        return
    saved = read_config(path)
    lora.adapter_path, lora.use_rslora = path, bool(saved.get("use_rslora"))
    lora.rank, lora.alpha = saved.get("r", 8), float(saved.get("lora_alpha", 8))
    if not isinstance(saved.get("target_modules"), list):
        raise ConfigError(
            f"the adapters in model.lora_adapter_path = {path!r} must list their target_modules, got "
            f"{saved.get('target_modules')!r}; save them with a list"
        )
    lora.target_modules = saved["target_modules"]
    lora.rank_pattern = dict(saved.get("rank_pattern") or {})
    lora.alpha_pattern = dict(saved.get("alpha_pattern") or {})


def in_verls_words(message: str) -> str:
    """Replace our config keys in a message by verl's field names."""
    for key, name in _LORA_FIELDS.items():
        message = message.replace(key, name)
    for table, section in ((_ENGINE_FIELDS, "engine"), (_OPTIM_FIELDS, "optim")):
        for key, name in table.items():
            message = message.replace(key, f"{section}.{name}")
            # A message may name further keys without their section.
            if key.startswith("parallelism."):
                message = re.sub(rf"\b{key.split('.')[1]}\b", name, message)
    return message


# ---- setting keys of the job config ----


def _set(job: JobConfig, key: str, value: Any) -> None:
    """Set a dotted key. Raises AttributeError for an unknown key."""
    section, _, name = key.rpartition(".")
    value_of(job, key)
    setattr(value_of(job, section), name, value)


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _set_optimizer(job: JobConfig, config: Any) -> None:
    for key, name in _OPTIM_FIELDS.items():
        _set(job, key, getattr(config, name))
    job.optimizer.beta1, job.optimizer.beta2 = config.betas
    total, warmup = config.total_training_steps, config.lr_warmup_steps
    is_known = total is not None and total > 0
    if warmup is None or warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total) if is_known else 0
    schedule = job.lr_scheduler
    schedule.warmup_steps = warmup
    # verl's schedules begin with a step of learning rate 0.
    schedule.step_offset = -1
    schedule.total_steps = total if is_known else max(warmup, 1)
    if not is_known:
        # Don't decay, because decay needs the total number of steps.
        schedule.decay_ratio = 0.0
    job.training.steps = schedule.total_steps


# ---- settings that are refused ----


def _engine_problems(config: Any) -> Iterator[str]:
    if not isinstance(config, TorchtitanEngineConfig):
        yield (
            f"torchtitan's engine is configured by verl's TorchtitanEngineConfig or a subclass, "
            f"got {type(config).__name__}; set engine=torchtitan on the command line"
        )
    if config.router_replay.mode not in ("disabled", "R3"):
        yield (
            "torchtitan's engine replays the experts of the rollout and records none itself, got "
            f"engine.router_replay.mode = {config.router_replay.mode!r}; set it to 'R3', and "
            "rollout.enable_rollout_routing_replay=true, or to 'disabled'"
        )
    others = config.tensor_parallel_size * config.pipeline_parallel_size
    data_parallel = num_ranks() // max(others * config.context_parallel_size, 1)
    if config.data_parallel_size not in (1, data_parallel):
        yield (
            f"engine.data_parallel_size must be 1 (unset) or {data_parallel}, the number of "
            f"processes that read different data, got {config.data_parallel_size}; correct it"
        )


def _optimizer_problems(engine_config: Any, config: Any) -> Iterator[str]:
    if config is None:
        if not engine_config.forward_only:
            yield (
                "an engine that trains needs an optimizer config, got None; give a config, or set "
                "engine.forward_only = true"
            )
        return
    missing = [name for name in _OPTIM_FIELDS.values() if not hasattr(config, name)]
    if missing:
        yield (
            f"torchtitan's optimizer is configured by verl's TorchtitanOptimizerConfig, got "
            f"{type(config).__name__} without {', '.join(missing)}; set optim=torchtitan on the "
            "command line"
        )


def _model_problems(config: Any, model_type: str) -> Iterator[str]:
    if config.lora.get("rank", 0) > 0:
        yield (
            f"model.lora.rank is for Megatron's engine, got {config.lora['rank']}; set "
            "model.lora_rank"
        )
    if has_adapters(config):
        names = ("exclude_modules", "target_parameters")
        others = {f"model.{name}": getattr(config, name, None) for name in names}
        yield from clash("model.target_modules", "chooses the layers of all adapters", others)
        targets = config.target_modules
        if isinstance(targets, str) and targets != "all-linear":
            yield (
                f"model.target_modules must be 'all-linear' or a list of names, got {targets!r}, which "
                "is a pattern; list the names"
            )
    hf_config = config.hf_config
    # A multimodal folder is accepted if one of our families reads its text model.
    has_text_model = getattr(hf_config, "text_config", None) is not None
    for part in ("vision_config", "audio_config"):
        trains_text = has_text_model and part == "vision_config" and model_type == "language_model"
        if getattr(hf_config, part, None) is not None and not trains_text:
            yield (
                f"torchtitan's engine trains models of text only, got a {hf_config.model_type!r} "
                f"with a {part} in {config.local_path}; use another engine"
            )
    if config.mtp.enable:
        yield (
            "torchtitan's engine has no multi-token prediction, got model.mtp.enable = true; set "
            "it to false"
        )
    architecture = config.architectures[0]
    endings = ("ForCausalLM", *["ForConditionalGeneration"] * has_text_model)
    if model_type == "language_model" and not architecture.endswith(endings):
        yield (
            f"a language model's config.json must name an architecture that ends in ForCausalLM, got "
            f"{architecture} in {config.local_path}; give the folder of a language model"
        )


def _checkpoint_problems(config: Any) -> Iterator[str]:
    for name in ("save_contents", "load_contents"):
        for part in getattr(config, name, CHECKPOINT_CONTENTS):
            yield from one_of(f"each entry of checkpoint.{name}", part, CHECKPOINT_CONTENTS)
    saved = getattr(config, "save_contents", CHECKPOINT_CONTENTS)
    if "model" not in saved and {"optimizer", "extra"} & set(saved):
        yield (
            f"checkpoint.save_contents must include 'model' to save 'optimizer' or 'extra', got "
            f"{list(saved)}; add 'model'"
        )
