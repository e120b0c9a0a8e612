"""What a checkpoint holds beside what a model wants.

Functions said to be collective must be called by every rank.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan.components import dcp
from torchtitan.components.checkpoint_folder import (
    DCP_METADATA,
    GIB,
    UNFINISHED_MARKER,
    WEIGHT_FILES,
    Contents,
    all_ranks,
    contents_of,
    find_damage,
    from_rank_zero,
)
from torchtitan.tools.errors import RunError
from torchtitan.tools.host import total_ram_bytes

if TYPE_CHECKING:
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"

_KEYS_SHOWN = 5

# Name of an entry -> its shape, or None when it is not a tensor.
Shapes = dict[str, tuple[int, ...] | None]


# Weights alone, for conversions


def zero_weights(model_cls: type[nn.Module], model_args: Any) -> dict[str, Any]:
    """The state dict of a model, all zeros and on the CPU, without the cost of initialising it.

    Raises ValueError if there cannot be such a model, or not on this machine.
    """
    try:
        with torch.device("meta"):
            model = model_cls(model_args)
    except RuntimeError as error:  # sizes that do not fit together, or whose product overflows
        raise ValueError(f"A model of these sizes cannot be made: {error}") from error
    weights = model.state_dict(keep_vars=True)
    n_bytes = sum(weight.nbytes for weight in {id(w): w for w in weights.values()}.values())
    memory = total_ram_bytes()
    if memory and n_bytes > memory:
        raise ValueError(
            f"The weights of this model take {n_bytes / GIB:.1f} GiB in fp32, and this machine has "
            f"{memory / GIB:.1f} GiB of memory"
        )
    zeros = {id(w): torch.zeros_like(w.detach(), device="cpu") for w in weights.values()}
    return {name: zeros[id(weight)] for name, weight in weights.items()}  # tied stay tied


def prepare_conversion(
    model_name: str,
    model_flavor: str,
    hf_assets_path: str | None = None,
    hf_config: str | None = None,
) -> tuple[dict[str, Any], "BaseStateDictAdapter", str]:
    """Zero weights of a flavor, to read into; the adapter to convert them with; what it is.

    hf_config: path of a config.json, which then decides in place of name and flavor.
    Raises ValueError for an unknown model or flavor, or one without an adapter.
    """
    from torchtitan.protocols.train_spec import get_train_spec

    model_args = None
    description = f"{model_name} {model_flavor}"
    if hf_config is not None:
        from torchtitan.models.hf_config import from_hf_config

        model_name, _, model_args = from_hf_config(hf_config)
        description = f"the {model_name} model of {hf_config}"
    spec = get_train_spec(model_name)
    if model_args is None and model_flavor not in spec.model_args:
        raise ValueError(
            f"{model_name} has no flavor {model_flavor!r}; it has {', '.join(spec.model_args)}"
        )
    if spec.state_dict_adapter is None:
        raise ValueError(f"{model_name} has no state_dict_adapter, so nothing to convert with")
    model_args = model_args or spec.model_args[model_flavor]
    weights = zero_weights(spec.model_cls, model_args)
    return weights, spec.state_dict_adapter(model_args, hf_assets_path), description


def load_weights(weights: dict[str, Any], path: str, model_description: str) -> None:
    """Read the model's entries of a DCP checkpoint into `weights`, in place. Collective.

    Raises ValueError if `path` is not a whole checkpoint of this model.
    """
    if damage := find_damage(path):
        raise ValueError(f"The checkpoint {path} is damaged: {damage}")
    saved = from_rank_zero(lambda: saved_shapes_in(path))
    if saved is None or contents_of(path) == Contents.UNFINISHED:
        raise ValueError(f"{path} is not the folder of a finished checkpoint")
    saved_weights = {key: saved[key] for key in saved.keys() - keys_outside_model(saved)}
    check_same_model(shapes_of(weights), saved_weights, path, model_description)
    with one_error(f"The checkpoint {path} could not be read"):
        dcp.load(weights, checkpoint_id=path)


@contextmanager
def replacing(folder: str, overwrite: bool, sources: Iterable[str]) -> Generator[str, None, None]:
    """A new folder to write to, which takes the place of `folder` once all of it is written.

    overwrite: `folder` may hold files. Weights among them are replaced, others are kept.
    sources: folders that are read; `folder` can neither lie in one of them nor hold one.
    Whatever happens while writing, `folder` stays as it was. Raises ValueError or OSError.
    """
    target = Path(folder).resolve()
    for source in (Path(source).resolve() for source in sources):
        if target.is_relative_to(source) or source.is_relative_to(target):
            raise ValueError(
                f"{folder} cannot be written while {source} is read, for one is in the other; "
                "give another folder to write to"
            )
    old_files = _files_to_keep(target, overwrite) if target.exists() else []
    if target.is_mount():
        raise ValueError(f"{folder} is a mounted volume, so is not replaced; give a folder in it")
    beside = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    before = target.with_name(f"{target.name}.before-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        yield str(beside)
        for file in old_files:
            shutil.copy2(file, beside, follow_symlinks=False)
        if target.exists():
            target.rename(before)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        if before.exists() and not target.exists():
            before.rename(target)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _files_to_keep(target: Path, overwrite: bool) -> list[Path]:
    """What `target` holds beside weights. ValueError if it may not be replaced."""
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder to write to")
    entries = list(target.iterdir())
    if entries and not overwrite:
        raise ValueError(
            f"{target} holds files already ({shorten(sorted(e.name for e in entries))}); give "
            "another folder, or --overwrite to replace the weights in it"
        )
    if folders := [entry.name for entry in entries if entry.is_dir()]:
        raise ValueError(
            f"{target} holds folders ({shorten(sorted(folders))}), so is not one of weights only, "
            "and is not overwritten; give another folder"
        )
    replaced = (UNFINISHED_MARKER, *WEIGHT_FILES)
    return [e for e in entries if not any(e.match(pattern) for pattern in replaced)]


# What a checkpoint holds, and what the model wants


def shapes_of(state_dict: dict[str, Any]) -> Shapes:
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in state_dict.items()
    }


def saved_shapes(reader: StorageReader) -> Shapes:
    entries = reader.read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in entries.items()
    }


def saved_shapes_in(path: str) -> Shapes | None:
    """None if the folder has no DCP metadata to tell."""
    metadata = os.path.join(path, DCP_METADATA)
    if not os.path.isfile(metadata) or os.path.getsize(metadata) == 0:
        return None
    return saved_shapes(dcp.SafeReader(path))


def flat_keys(name: str, state: Any) -> set[str]:
    """The keys under which DCP stores one component."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    content = state.state_dict() if isinstance(state, Stateful) else state
    return set(flatten_state_dict({name: content})[0])


def keys_outside_model(saved: Shapes, states: Iterable[str] = ()) -> set[str]:
    components = {OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, *states} - {MODEL}
    return {key for key in saved if key.split(".")[0] in components}


def keys_of(component: str, keys: Iterable[str]) -> set[str]:
    """The keys inside one component, without its name."""
    return {key.removeprefix(f"{component}.") for key in keys if key.startswith(f"{component}.")}


def check_same_model(wanted: Shapes, saved: Shapes, path: str, model_description: str) -> None:
    """Compare the weights that all ranks together want with those that are saved. Collective."""
    wanted = {name: shape for part in all_ranks(wanted) for name, shape in part.items()}
    other_shape = [
        f"{name}: saved {list(saved[name] or ())}, model {list(wanted[name] or ())}"
        for name in sorted(wanted.keys() & saved.keys())
        if wanted[name] != saved[name]
    ]
    differences = {
        "not in the checkpoint": sorted(wanted.keys() - saved.keys()),
        "not in the model": sorted(saved.keys() - wanted.keys()),
        "of another shape": other_shape,
    }
    found = [f"{what}: {shorten(keys)}" for what, keys in differences.items() if keys]
    if found:
        raise ValueError(
            f"The checkpoint {path} is not one of {model_description}, the model that the config "
            f"asks for ({'; '.join(found)}). Set model.name and model.flavor to the saved model, "
            "or load another checkpoint"
        )


def check_no_key_missing(component: str, missing: set[str], path: str) -> None:
    """Collective."""
    missing = set().union(*all_ranks(missing))
    if missing:
        raise ValueError(
            f"The checkpoint {path} lacks entries of {component}: {shorten(sorted(missing))}. "
            f"Add {component} to checkpoint.exclude_from_loading to load without it"
        )


def shorten(names: list[str]) -> str:
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    return ", ".join(names[:_KEYS_SHOWN]) + more


@contextmanager
def one_error(what: str, advice: Callable[[], str] = str) -> Generator[None, None, None]:
    """Make one sentence, a RunError, of DCP's exception, a BaseException that quotes every rank's
    stack, and of the file system's. `advice` is asked for what comes after it."""
    try:
        yield
    except dcp.CheckpointException as error:
        reasons = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        told = f"{what} (on rank {ranks}): {'; '.join(sorted(reasons))}"
        raise RunError(told + advice()) from error
    except OSError as error:
        raise RunError(f"{what}: {type(error).__name__}: {error}{advice()}") from error
