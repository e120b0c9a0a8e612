"""What a checkpoint holds beside what a model wants.

Functions said to be collective must be called by every rank.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan.components import dcp
from torchtitan.components.checkpoint_folder import (
    DCP_METADATA,
    Contents,
    all_ranks,
    contents_of,
    find_damage,
    from_rank_zero,
)
from torchtitan.tools.errors import RunError

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
    """The state dict of a model, all zeros and on the CPU, without the cost of initialising it."""
    with torch.device("meta"):
        model = model_cls(model_args)
    weights = model.state_dict(keep_vars=True)
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
