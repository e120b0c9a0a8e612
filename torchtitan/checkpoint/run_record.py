"""The settings of the run that wrote a checkpoint, compared with the run that continues from it.

The record is a flat table of strings and numbers, `run.json` in the step folder. Checkpoints of
older versions and other tools have no record and are not compared.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from typing import Any

from torchtitan.checkpoint.folder import RUN_RECORD
from torchtitan.config import JobConfig
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger

_MOST_CHARACTERS = 100_000

_OWN = "this run's is used"
_SAVED = "the saved one is used"
_OWN_DATA = (
    f"{_OWN}, from the saved position on; checkpoint.exclude_from_loading = ['dataloader'] "
    "starts from its beginning"
)

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
    "training.dataset": ("dataloader", _OWN_DATA),
    "training.dataset_path": ("dataloader", _OWN_DATA),
    "training.seq_len": ("dataloader", _OWN),
    "training.packing": ("dataloader", _OWN),
    "training.max_norm": ("optimizer", _OWN),
    "training.dtype": ("optimizer", _OWN),
    "training.mixed_precision_param": ("optimizer", _OWN),
}
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
) -> dict[str, Any]:
    """Return the settings that matter to a run that continues from this run's checkpoints.

    Ranks compare their records before they train. A continued run doesn't use the recorded `seed`.
    """
    record: dict[str, Any] = {"seed": seed}
    for key in (_OPTIMIZER, *_WHICH_IS_USED):
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        is_table = isinstance(value, list) or dataclasses.is_dataclass(value)
        record[key] = json.dumps(value, default=vars) if is_table else value
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


def compare_with_saved(path: str, own: dict[str, Any], loaded: Collection[str]) -> None:
    """Warn of each setting that differs from the run that wrote `path`. Collective.

    own: this run's record. loaded: the components whose state comes from the checkpoint.
    Raises ValueError if the saved optimizer is of another kind, or groups parameters differently.
    """
    saved = from_rank_zero(lambda: read_record(path))
    if "optimizer" in loaded:
        check_same_optimizer(saved, own, path)
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
