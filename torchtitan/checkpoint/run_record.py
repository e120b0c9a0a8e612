"""The settings of the run that wrote a checkpoint, compared with the run that continues from it.

The record is a flat table of strings and numbers, `run.json` in the step folder. Checkpoints of
older versions and other tools have no record and are not compared.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torchtitan.checkpoint.folder import RUN_RECORD
from torchtitan.config import JobConfig
from torchtitan.config.checks.common import guess
from torchtitan.config.checks.unused import without_effect
from torchtitan.data.document_sources import Source
from torchtitan.data.local_files import record_of as record_of_files
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf_config import facts_of
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import find_shipped, open_file
from torchtitan.tools.logging import logger

_MOST_CHARACTERS = 100_000

_OWN = "this run's is used"
_SAVED = "the saved one is used"

# Setting -> (component, message if the component's state is loaded from the checkpoint). If it is
# not loaded, this run's setting is used.
_WHICH_IS_USED = {
    "optimizer.lr": ("lr_scheduler", _SAVED),
    "optimizer.beta1": ("optimizer", _SAVED),
    "optimizer.beta2": ("optimizer", _SAVED),
    "optimizer.eps": ("optimizer", _SAVED),
    "optimizer.weight_decay": ("optimizer", _SAVED),
    "optimizer.groups": ("optimizer", _SAVED),
    "optimizer.muon": ("optimizer", _OWN),
    "optimizer.state_dtype": ("optimizer", _OWN),
    "lr_scheduler.warmup_steps": ("lr_scheduler", _OWN),
    "lr_scheduler.total_steps": ("lr_scheduler", _OWN),
    "lr_scheduler.decay_ratio": ("lr_scheduler", _OWN),
    "lr_scheduler.decay_type": ("lr_scheduler", _OWN),
    "lr_scheduler.min_lr_factor": ("lr_scheduler", _OWN),
    "lr_scheduler.step_offset": ("lr_scheduler", _OWN),
    "lr_scheduler.init_lr_factor": ("lr_scheduler", _OWN),
    "training.steps": ("lr_scheduler", _OWN),
    "training.seq_len": ("dataloader", _OWN),
    "training.max_norm": ("optimizer", _OWN),
    "training.dtype": ("optimizer", _OWN),
    "training.mixed_precision_param": ("optimizer", _OWN),
}
# Settings that change what the model computes, and what it reads. A run that continues has the same,
# unless checkpoint.allow_changed names them, or, of the latter, the data position is not loaded.
_FUNCTION = (
    "lora.alpha",
    "lora.use_rslora",
    "lora.alpha_pattern",
    "lora.dropout",
    "training.restart_positions",
    "training.mask_boundary_loss",
)
_MODEL_ARGS = "model.args."  # with the name of each
_DATA = (
    "training.dataset",
    "training.dataset_path",
    "training.mixture",
    "training.packing",
    "training.shuffle",
    "training.data_seed",
    "training.too_long",
    "training.bos_token",
    "training.eos_token",
    "training.chat_template",
    "validation.dataset",
    "validation.dataset_path",
)
_CONTENT = "content of "  # begins the entry of the digest of what a setting names
_GLOBAL_BATCH_SIZE = "global batch size"
_TOKENIZER = "tokenizer"
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
    """Return the settings that matter to a run that continues from this run's checkpoints.

    Ranks compare their records before they train. A continued run doesn't use the recorded `seed`.
    sources: of the training data. Raises ConfigError for a wrong name in checkpoint.allow_changed.
    """
    record: dict[str, Any] = {"seed": seed}
    has_adapters, validates = "lora" in config.model.converters, config.validation.enable
    unread = without_effect(config)
    for key in (_OPTIMIZER, *_WHICH_IS_USED, *_FUNCTION, *_DATA):
        if key in unread:
            continue
        section, name = key.split(".")
        if name.endswith(("dataset_path", "chat_template")) or key == "training.mixture":
            continue  # their content is compared
        if (section != "lora" or has_adapters) and (section != "validation" or validates):
            value = getattr(getattr(config, section), name)
            is_plain = isinstance(value, str | int | float | None)
            record[key] = value if is_plain else json.dumps(value, default=vars)
    if isinstance(model_args, DecoderArgs):
        facts = facts_of(model_args) | {"attn_mask_type": model_args.attn_mask_type}
        record |= {f"{_MODEL_ARGS}{name}": json.dumps(x, default=str) for name, x in facts.items()}
    record |= _contents(config, sources)
    known = {*_FUNCTION, *_DATA, *(key for key in record if key.startswith(_MODEL_ARGS))}
    for name in config.checkpoint.allow_changed:
        if name not in known:
            raise ConfigError(
                f"checkpoint.allow_changed names settings that a resume compares, got {name!r}"
                f"{guess(name, known)}; correct or remove it"
            )
    record[_PATTERNS] = json.dumps([table.pattern for table in config.optimizer.groups])
    record[_GLOBAL_BATCH_SIZE] = global_batch_size
    backend = getattr(tokenizer, "tokenizer", None)
    if hasattr(backend, "get_vocab"):  # a client's own tokenizer may lack it
        vocabulary = json.dumps(sorted(backend.get_vocab().items()))
        digest = hashlib.sha256(vocabulary.encode()).hexdigest()[:12]
        record[_TOKENIZER] = f"{backend.get_vocab_size()} tokens, digest {digest}"
    if num_documents is not None:
        record["number of documents"] = num_documents  # not compared here
    return record


def _contents(config: JobConfig, sources: Sequence[Source]) -> dict[str, str]:
    """Return digests of the data, and of the chat template."""
    files = [
        [source.name, record_of_files(find_shipped(source.path), is_movable=True)]
        for source in sources
    ]
    templates = {getattr(source.encode, "template", None) for source in sources} - {None}
    mixture = config.training.mixture
    contents: dict[str, Any] = {
        "training.mixture" if mixture else "training.dataset_path": [
            files,
            [[source.weight, source.epochs] for source in mixture],
        ]
    }
    if templates:
        contents["training.chat_template"] = sorted(map(str, templates))
    if config.validation.enable and (path := config.validation.dataset_path):
        contents["validation.dataset_path"] = record_of_files(path, is_movable=True)
    return {
        f"{_CONTENT}{key}": hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
        for key, value in contents.items()
        if sources or key.startswith("validation")
    }


def compare_with_saved(
    saved: dict[str, Any],
    own: dict[str, Any],
    path: str,
    loaded: Collection[str],
    allowed: Collection[str] = (),
) -> None:
    """Warn of each setting that differs from the run that wrote `path`.

    saved, own: the record in `path`, and this run's. loaded: the components whose state comes from the
    checkpoint. allowed: the settings whose difference changes what the model computes or reads, and
    is only warned of.
    Raises ValueError for other such differences, and if the saved optimizer is of another kind, or
    groups parameters differently.
    """
    if "optimizer" in loaded:
        check_same_optimizer(saved, own, path)
    check_same_meaning(saved, own, path, loaded, allowed)
    for difference in differences(saved, own, loaded):
        logger.warning(f"Continuing from {path}, but {difference}")


def read_record(folder: str) -> dict[str, Any]:
    """The record in a step folder; empty if there is none."""
    path = os.path.join(folder, RUN_RECORD)
    if not os.path.isfile(path):
        return {}
    try:
        with open_file(path, encoding="utf-8") as file:
            record = json.loads(file.read(_MOST_CHARACTERS))
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        logger.warning(
            f"{path} cannot be read, so this run's settings are not compared with the saved ones"
        )
        return {}
    return record


def check_same_optimizer(saved: dict[str, Any], own: dict[str, Any], path: str) -> None:
    """Raise ValueError for another kind of optimizer, or other groups.

    The state of another kind has another meaning, and each group loads the settings of its number.
    """
    for key, excluded in (
        (_OPTIMIZER, "['optimizer']"),
        (_PATTERNS, "['optimizer', 'lr_scheduler']"),
    ):
        values = saved.get(key), own.get(key)
        if None not in values and values[0] != values[1]:
            raise ValueError(
                f"{path} was saved with {key} = {values[0]!r}, got {values[1]!r}; set it back, or "
                f"start the new optimizer's state from zero with checkpoint.exclude_from_loading = "
                f"{excluded}"
            )


def check_same_meaning(
    saved: dict[str, Any],
    own: dict[str, Any],
    path: str,
    loaded: Collection[str],
    allowed: Collection[str],
) -> None:
    """Raise ValueError if another function or other data would be trained; see `compare_with_saved`."""
    refused = []
    for key in saved.keys() & own.keys():
        name = key.removeprefix(_CONTENT)
        is_data = name in _DATA
        if saved[key] == own[key] or not (
            is_data or name in _FUNCTION or name.startswith(_MODEL_ARGS)
        ):
            continue
        difference = f"{key} was {saved[key]!r} when it was saved and is {own[key]!r} now"
        if name in allowed or (is_data and "dataloader" not in loaded):
            logger.warning(f"Continuing from {path}, but {difference}: {_OWN}")
        else:
            refused.append((name, difference))
    if refused:
        names = sorted({name for name, _ in refused})
        raise ValueError(
            f"The run cannot continue from {path}: {'; '.join(sorted(d for _, d in refused))}. The model "
            "would compute or read something else than it was trained on; set it back, or allow it "
            f"with checkpoint.allow_changed = {names}"
        )


def differences(
    saved: dict[str, Any], own: dict[str, Any], loaded: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each setting that differs: both values and which one is used.

    loaded: the components whose state comes from the checkpoint.
    """
    for key, (component, if_loaded) in _WHICH_IS_USED.items():
        if key in saved and key in own and saved[key] != own[key]:
            used = if_loaded if component in loaded else _OWN
            yield f"{key} was {saved[key]!r} when it was saved and is {own[key]!r} now: {used}"
    for key, used in (
        (_GLOBAL_BATCH_SIZE, _OWN),
        (_TOKENIZER, f"{_OWN}, with which the weights were not trained"),
    ):
        if key in saved and key in own and saved[key] != own[key]:
            yield f"the {key} was {saved[key]} when it was saved and is {own[key]} now: {used}"
