"""What a run's states are called in a checkpoint, and how they are fitted to what one holds.

Model entries stand at the top level of a checkpoint under their parameter names; the other
components under `optimizer`, `lr_scheduler`, `dataloader`, `train_state`, those of RL, and
`user_state`.
"""

import os
import pickle
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.utils._pytree import tree_map_only

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import DCP_METADATA
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.tools.logging import logger
from torchtitan.tools.unpickling import read_plain

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
USER_STATE = "user_state"
# Of `torchtitan.rl` and of embedding programs, and not of every run that reads the weights.
EXTRA_STATES = ("rl", "rl_reference", "rl_critic", "rl_generator", USER_STATE)

WEIGHTS_ONLY = (
    "the optimizer, step and data position start from zero. To continue from an earlier full "
    "checkpoint, name its step in checkpoint.load_step"
)

_KEYS_SHOWN = 5
# Entries of the train state that older checkpoints, and the reference's, do not have.
_KEYS_SINCE_FIRST_VERSION = {"weights_version"}

# Name of an entry -> its shape, or None when it is not a tensor.
Shapes = dict[str, tuple[int, ...] | None]


class ModelWrapper(Stateful):
    """The parameters and persistent buffers of all model parts, as one state dict.

    `state_dict()` returns a cached dict whose tensors are the live parameters, not copies.
    Call `refresh()` when the cached ones may be the wrong tensors: a client has moved parameters,
    or FSDP holds gathered ones after an evaluation.
    """

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.refresh()

    def _get_state_dict(self) -> dict[str, Any]:
        return {
            name: tensor
            for part in self.model
            for name, tensor in get_model_state_dict(part).items()
        }

    def release(self) -> None:
        """Hold no tensor until the next call that needs one, so that their memory can be freed."""
        self.cache_state_dict = None

    def refresh(self) -> None:
        for part in self.model:
            reshard_model(part)
        self.cache_state_dict: dict[str, Any] | None = self._get_state_dict()

    def state_dict(self) -> dict[str, Any]:
        if self.cache_state_dict is None:
            self.refresh()
        return self.cache_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each part skips entries that it does not have: they belong to another part."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))
        self.refresh()


class UserState(Stateful):
    """What an embedding program adds to checkpoints: objects with a state of plain data, by name.

    A state is one entry of the checkpoint however it grows, and all ranks' is that of one of them.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, name: str, state: Any) -> None:
        """See `TrainingEngine.add_state`."""
        if "." in name or name in self._objects:
            raise ValueError(
                f"a state's name must be new and without a dot, got {name!r} beside "
                f"{sorted(self._objects)}; take another one"
            )
        if not isinstance(state, Stateful):
            raise ValueError(
                f"the state {name!r} must have the methods state_dict() and load_state_dict(), got a "
                f"{type(state).__name__}; wrap it in an object that has them"
            )
        _pickled(name, state)
        self._objects[name] = state

    def state_dict(self) -> dict[str, bytes]:
        return {name: _pickled(name, state) for name, state in self._objects.items()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        for name, state in self._objects.items():
            state.load_state_dict(read_plain(state_dict[name], f"the saved state {name!r}"))


def _pickled(name: str, state: Any) -> bytes:
    """Raises ValueError for what could not be read again."""
    content = tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), state.state_dict())
    data = pickle.dumps(content)
    read_plain(data, f"the state {name!r}, which checkpoints are to hold,")
    return data


def fit_to_checkpoint(
    states: dict[str, Any], all_states: Mapping[str, Any], path: str, model_description: str
) -> dict[str, Any]:
    """The `states` to hand to DCP for the checkpoint `path`, after comparing the two. Collective.

    states: those to load, the model's at the top level. all_states: those of the run, by name.
    Raises ValueError, the same on every rank, when the checkpoint lacks something or is one of
    another model.
    """
    saved = from_rank_zero(lambda: saved_shapes_in(path))
    if saved is None:
        return states
    model_names = all_states[MODEL].state_dict().keys()
    others = {name: state for name, state in states.items() if name not in model_names}
    own_keys = {}  # under which DCP stores each component
    for name, state in others.items():
        content = state.state_dict() if isinstance(state, Stateful) else state
        own_keys[name] = set(flatten_state_dict({name: content})[0])
    saved_others = keys_outside_model(saved, all_states)
    left_out = {key.split(".")[0] for key in saved_others} - all_states.keys()
    if others and (left_out := sorted(left_out.intersection(EXTRA_STATES))):
        logger.info(f"{path} also holds {', '.join(left_out)}, which this run does not have")

    if model_names <= states.keys():
        weights = {name: states[name] for name in model_names}
        saved_weights = {key: saved[key] for key in saved.keys() - saved_others}
        check_same_model(shapes_of(weights), saved_weights, path, model_description)
    if others and not saved_others:
        logger.warning(f"{path} holds weights only: {WEIGHTS_ONLY}")
        return {name: states[name] for name in model_names if name in states}

    def show(name: str, entries: dict[str, Any]) -> None:
        """Let DCP, which reads what it is shown, see these entries in place of the component's."""
        load = others[name].load_state_dict
        states[name] = SimpleNamespace(state_dict=lambda: entries, load_state_dict=load)

    states = dict(states)
    if DATALOADER in others:
        positions = _keys_of(DATALOADER, saved)
        own_positions = _keys_of(DATALOADER, own_keys[DATALOADER])
        if positions and positions != set().union(*all_ranks(own_positions)):
            # The loader divides the positions of all ranks that saved one.
            show(DATALOADER, dict.fromkeys(positions))
            own_keys[DATALOADER] = set()
    if TRAIN_STATE in others:
        known = _keys_of(TRAIN_STATE, saved)
        newer = {f"{TRAIN_STATE}.{key}" for key in _KEYS_SINCE_FIRST_VERSION - known}
        if own_keys[TRAIN_STATE] & newer:
            content = others[TRAIN_STATE].state_dict()
            show(TRAIN_STATE, {key: value for key, value in content.items() if key in known})
            own_keys[TRAIN_STATE] -= newer
    for name, keys in own_keys.items():
        if missing := set().union(*all_ranks(keys - saved.keys())):
            raise ValueError(
                f"The checkpoint {path} lacks entries of {name}: {shorten(sorted(missing))}. "
                f"Add {name} to checkpoint.exclude_from_loading to load without it"
            )
    return states


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
    """None if the folder has no DCP metadata, or an empty file as the reference's tests do."""
    metadata = os.path.join(path, DCP_METADATA)
    if not os.path.isfile(metadata) or os.path.getsize(metadata) == 0:
        return None
    return saved_shapes(dcp.SafeReader(path))


def keys_outside_model(saved: Shapes, states: Iterable[str] = ()) -> set[str]:
    components = {OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, *EXTRA_STATES, *states} - {
        MODEL
    }
    return {key for key in saved if key.split(".")[0] in components}


def _keys_of(component: str, keys: Iterable[str]) -> set[str]:
    """The keys inside one component, without its name."""
    return {key.removeprefix(f"{component}.") for key in keys if key.startswith(f"{component}.")}


def shorten(names: list[str]) -> str:
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    return ", ".join(names[:_KEYS_SHOWN]) + more
