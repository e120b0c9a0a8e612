"""Records a run's settings in `run.json` of its checkpoints, and compares them when a run resumes."""

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from torchtitan.checkpoint.folder import RUN_RECORD
from torchtitan.config import JobConfig
from torchtitan.config.checks.common import guess
from torchtitan.config.checks.unused import without_effect
from torchtitan.config.checks.values import settings_of
from torchtitan.data.document_sources import Source
from torchtitan.data.local_files import record_of as record_of_files
from torchtitan.data.token_files import tokenizer_hash
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf_config import facts_of
from torchtitan.tools import storage
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import find_shipped, read_json_object
from torchtitan.tools.logging import logger

_OWN = "this run's value is used"
_SAVED = "the saved value is used"


def _settings(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


# Settings whose saved values are restored with a component's state -> the component.
_SAVED_WITH = {"optimizer.lr": "lr_scheduler"} | dict.fromkeys(
    _settings("optimizer", "beta1 beta2 eps weight_decay groups"), "optimizer"
)
# Settings whose difference is only logged.
_TOLD = (
    *_SAVED_WITH,
    *_settings("optimizer", "muon state_dtype"),
    *_settings("lr_scheduler", "warmup_steps total_steps decay_ratio decay_type min_lr_factor"),
    *_settings("lr_scheduler", "step_offset init_lr_factor"),
    *_settings("loss", "name beta label_smoothing length_normalized reference teacher divergence"),
    *_settings("loss", "top_k kl_weight label_weight temperature"),
    *_settings("training", "steps seq_len max_norm dtype mixed_precision_param"),
)
# Settings that change what the model computes. A resume refuses a difference, unless allow_changed names
# the setting. The same holds for `_DATA` if the data position is loaded.
_FUNCTION = (
    "model.hf_assets_path",
    *_settings("lora", "alpha use_rslora alpha_pattern dropout"),
    *_settings("training", "restart_positions mask_boundary_loss"),
)
_MODEL_ARGS = "model.args."  # prefix of the names of model args
_DATA = (
    *_settings("training", "dataset dataset_path mixture packing shuffle data_seed too_long"),
    *_settings("training", "bos_token eos_token chat_template"),
    *_settings("validation", "dataset dataset_path"),
)
_RL = ("rl.task.", "rl.sampling.", "rl.seed")  # prefixes of settings that a resume must not change
_RL_OF_PROCESSES = ("rl.serve.", "rl.generator.", "rl.log_samples")
_BY_CONTENT = (
    "model.hf_assets_path",
    *_settings("training", "dataset_path mixture chat_template"),
    "validation.dataset_path",
    *_settings("rl.task", "path eval_path chat_template"),
)
_CONTENT = "content of "  # prefix + setting -> digest of the setting's files
_GLOBAL_BATCH_SIZE = "global batch size"
_OPTIMIZER = "optimizer.name"
_PATTERNS = "patterns of optimizer.groups"


def record_of(
    config: JobConfig,
    global_batch_size: int,
    tokenizer: BaseTokenizer | None,
    num_documents: int | None = None,
    seed: int | None = None,
    model_args: Any = None,
    sources: Sequence[Source] = (),
) -> dict[str, Any]:
    """Return the settings to save in this run's checkpoints, and to compare when a run resumes.

    sources: sources of the training data. Raises ConfigError for an unknown name in checkpoint.allow_changed.
    """
    record: dict[str, Any] = {"seed": seed}
    unread = without_effect(config)
    is_off = {
        "lora": "lora" not in config.model.converters,
        "validation": not config.validation.enable,
        "loss": not config.loss.name,
    }
    for key in (_OPTIMIZER, *_TOLD, *_FUNCTION, *_DATA):
        section, name = key.split(".")
        if not (key in unread or key in _BY_CONTENT or is_off.get(section)):
            record[key] = _plain(getattr(getattr(config, section), name))
    if isinstance(model_args, DecoderArgs):
        facts = facts_of(model_args) | {"attn_mask_type": model_args.attn_mask_type}
        record |= {f"{_MODEL_ARGS}{name}": json.dumps(x, default=str) for name, x in facts.items()}
    record |= _contents(config, sources) | _of_tokenizer(tokenizer)
    known = {*_FUNCTION, *_DATA, *(key for key in record if key.startswith(_MODEL_ARGS))}
    known |= {key for key, *_ in settings_of(config) if key.startswith(_RL)}
    for name in config.checkpoint.allow_changed:
        if name not in known:
            raise ConfigError(
                f"checkpoint.allow_changed takes settings that a resume compares, got {name!r}"
                f"{guess(name, known)}; correct or remove it"
            )
    record[_PATTERNS] = json.dumps([table.pattern for table in config.optimizer.groups])
    record[_GLOBAL_BATCH_SIZE] = global_batch_size
    if num_documents is not None:
        record["number of documents"] = num_documents  # compared between ranks, not on resume
    return record


def record_of_task(rl: Any, task: Any) -> dict[str, Any]:
    """Return the RL settings to compare on resume. rl: the section `[rl]`. task: the task in use."""
    record = {
        key: _plain(value)
        for key, value, *_ in settings_of(rl, "rl.")
        if not key.startswith(_RL_OF_PROCESSES)
        and not key.endswith(("_processes", "_timeout_seconds"))
        and key not in _BY_CONTENT
    }
    record["rl.task.name"] = f"{rl.task.name} ({type(task).__name__})"
    contents = {
        "rl.task.path": record_of_files(rl.task.path, is_movable=True),
        "rl.task.eval_path": record_of_files(rl.task.eval_path, is_movable=True),
        "rl.task.chat_template": getattr(getattr(task, "chat", None), "source", ""),
    }
    return record | _digests(contents) | _of_tokenizer(task.tokenizer)


def _plain(value: Any) -> Any:
    is_plain = isinstance(value, str | int | float | None)
    return value if is_plain else json.dumps(value, default=vars)


def _of_tokenizer(tokenizer: BaseTokenizer | None) -> dict[str, str]:
    hashed = tokenizer_hash(tokenizer)
    return _digests({"model.hf_assets_path": hashed}) if hashed else {}


def _digests(contents: dict[str, Any]) -> dict[str, str]:
    return {
        f"{_CONTENT}{key}": hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
        for key, value in contents.items()
    }


def _contents(config: JobConfig, sources: Sequence[Source]) -> dict[str, str]:
    """Return digests of the training and validation data and of the chat templates."""
    files = [[s.name, record_of_files(find_shipped(s.path), is_movable=True)] for s in sources]
    templates = {getattr(source.encode, "template", None) for source in sources} - {None}
    mixture = config.training.mixture
    contents: dict[str, Any] = {}
    if sources:
        weights = [[source.weight, source.epochs] for source in mixture]
        contents["training.mixture" if mixture else "training.dataset_path"] = [files, weights]
    if templates:
        contents["training.chat_template"] = sorted(map(str, templates))
    if config.validation.enable and (path := config.validation.dataset_path):
        contents["validation.dataset_path"] = record_of_files(path, is_movable=True)
    return _digests(contents)


def read_record(folder: str) -> dict[str, Any]:
    """Return the record in a step folder; empty if the folder has none."""
    path = storage.join(folder, RUN_RECORD)
    if not storage.is_file(path):
        return {}
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        logger.warning(f"This run's settings are not compared with the saved ones: {error}")
        return {}


def compare_with_saved(
    saved: dict[str, Any],
    own: dict[str, Any],
    path: str,
    loaded: Collection[str],
    allowed: Collection[str] = (),
) -> None:
    """Warn of each setting that differs from the run that wrote `path`.

    saved: the record in `path`. own: this run's record. loaded: the components whose state is loaded.
    allowed: `checkpoint.allow_changed`.
    Raises ValueError for a difference that changes the model or the data and is not in `allowed`, and
    for another optimizer or other group patterns, because group settings are loaded by index.
    """
    for key, excluded in (
        (_OPTIMIZER, "['optimizer']"),
        (_PATTERNS, "['optimizer', 'lr_scheduler']"),
    ):
        values = saved.get(key), own.get(key)
        if "optimizer" in loaded and None not in values and values[0] != values[1]:
            raise ValueError(
                f"{path} was saved with {key} = {values[0]!r}, got {values[1]!r}; set it back, or start the "
                f"new optimizer's state from zero with checkpoint.exclude_from_loading = {excluded}"
            )
    refused: dict[str, str] = {}
    for key in (key for key in own if key in saved):
        name = key.removeprefix(_CONTENT)
        is_data, is_rl = name in _DATA, name.startswith(_RL)
        is_told = key in (*_TOLD, _GLOBAL_BATCH_SIZE) or key.startswith("rl.")
        is_function = name in _FUNCTION or name.startswith(_MODEL_ARGS)
        if saved[key] == own[key] or not (is_data or is_rl or is_told or is_function):
            continue
        difference = f"{key} was {saved[key]!r} when it was saved and is {own[key]!r} now"
        is_fixed = is_function or is_rl or (is_data and "dataloader" in loaded)
        if is_fixed and name not in allowed:
            refused[name] = difference
        else:
            used = _SAVED if _SAVED_WITH.get(key) in loaded else _OWN
            logger.warning(f"Continuing from {path}, but {difference}: {used}")
    if refused:
        raise ValueError(
            f"The run cannot continue from {path}: {'; '.join(refused.values())}. The model would "
            "compute something else, or read other data, than before; set them back, or allow them with "
            f"checkpoint.allow_changed = {sorted(refused)}"
        )
