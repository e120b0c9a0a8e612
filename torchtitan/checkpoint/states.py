"""The states of a run, their names in a checkpoint, and how they are matched with a saved one.

Model entries stand at the top level of a checkpoint under their parameter names; the other
components under `optimizer`, `lr_scheduler`, `dataloader`, `train_state`, RL's names, and
`user_state`.
"""

import os
import pickle
from collections.abc import Iterable, Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan.adapters.lora import adapted_weights, adapter_names
from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import DCP_METADATA
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.distributed.seeded_init import name_without_wrappers
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger
from torchtitan.tools.unpickling import read_plain

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
USER_STATE = "user_state"
# States of `torchtitan.rl` and of embedding programs. A run that only reads the weights lacks them.
EXTRA_STATES = ("rl", "rl_reference", "rl_critic", "rl_generator", USER_STATE)

WEIGHTS_ONLY = (
    "the optimizer, step and data position start from zero. To continue from an earlier full "
    "checkpoint, name its step in checkpoint.load_step"
)

_KEYS_SHOWN = 5
# Entries of the train state that older checkpoints and the reference's checkpoints lack.
_KEYS_SINCE_FIRST_VERSION = {"weights_version"}

# Name of an entry -> its shape; None if the entry is not a tensor.
Shapes = dict[str, tuple[int, ...] | None]


class ModelWrapper(Stateful):
    """The parameters and persistent buffers of all model parts, as one state dict.

    `state_dict()` returns the live parameters, not copies. They are collected at each call, because
    a client may have moved parameters, or exchanged their memory, since the last one.

    has_adapters: the parts have adapters beside frozen weights. `state_dict()` then returns only
        what trains.
    """

    def __init__(self, model: nn.Module | list[nn.Module], has_adapters: bool = False) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.has_adapters = has_adapters
        self.adapted = list(adapted_weights(self.model))
        self.trained = [
            name_without_wrappers(name)
            for part in self.model
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]

    def _get_state_dict(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for part in self.model:
            reshard_model(part)  # FSDP holds gathered parameters after an evaluation
            entries |= get_model_state_dict(part)
        return entries

    @property
    def cache_state_dict(self) -> dict[str, Any]:
        """The reference's name of `whole`."""
        return self.whole()

    def state_dict(self) -> dict[str, Any]:
        whole = self.whole()
        return {name: whole[name] for name in self.trained} if self.has_adapters else whole

    def whole(self) -> dict[str, Any]:
        """Return all entries: the base model's and the adapters'."""
        return self._get_state_dict()

    def base(self) -> dict[str, Any]:
        """Return the entries of the model without its adapters."""
        of_adapters = adapter_names(self.adapted)
        return {name: entry for name, entry in self.whole().items() if name not in of_adapters}

    def frozen(self) -> dict[str, Any]:
        """Return the entries that do not train."""
        return {name: entry for name, entry in self.whole().items() if name not in self.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each part's entries. A part skips the entries of other parts."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


def with_model_on_top(states: dict[str, Any]) -> dict[str, Any]:
    """The states, with the model's entries at the top level under their own names."""
    others = {name: state for name, state in states.items() if name != MODEL}
    return others | (states[MODEL].state_dict() if MODEL in states else {})


def live_states(states: dict[str, Any]) -> dict[str, Any]:
    """The contents of a full checkpoint, with the live tensors."""
    return {
        name: state.state_dict() if isinstance(state, Stateful) else state
        for name, state in with_model_on_top(states).items()
    }


def cast_weights(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights with floating-point tensors in `dtype`."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def without_excluded(states: dict[str, Any], excluded: list[str]) -> dict[str, Any]:
    """The states to load: neither excluded nor None, which stands for an absent dataloader.

    Raises ConfigError if a name in `excluded` (checkpoint.exclude_from_loading) is unknown.
    """
    for name in excluded:
        if name not in states:
            raise ConfigError(
                f"checkpoint.exclude_from_loading can hold {', '.join(states)}, got {name!r}; "
                "correct or remove it"
            )
    return {
        name: state for name, state in states.items() if name not in excluded and state is not None
    }


class UserState(Stateful):
    """Objects that an embedding program adds to checkpoints, by name. Their states are plain data.

    Each state is pickled to one entry of the checkpoint, whatever its size; one rank's entry is
    saved and every rank loads it.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, name: str, state: Any) -> None:
        """See `TrainingEngine.add_state`."""
        if "." in name or name in self._objects:
            raise ValueError(
                f"a state's name must be new and contain no dot, got {name!r} beside "
                f"{sorted(self._objects)}; choose another name"
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
    """Pickle a state. Raises ValueError if a load would refuse to read it."""
    content = torch_parts.pytree.tree_map_only(
        torch.Tensor, lambda x: x.detach().cpu(), state.state_dict()
    )
    data = pickle.dumps(content)
    read_plain(data, f"the state {name!r}, which checkpoints are to hold,")
    return data


def fit_to_checkpoint(
    states: dict[str, Any],
    all_states: Mapping[str, Any],
    model_names: Set[str],
    path: str,
    model_description: str,
) -> dict[str, Any]:
    """Compare `states` with the checkpoint `path`; return the states for DCP to load. Collective.

    states: the states to load, with the model's entries at the top level.
    all_states: all states of the run, by component. model_names: the entries of a whole load that
        are the model's.
    Raises ValueError, the same on every rank, if the checkpoint lacks an entry or belongs to
    another model.
    """
    saved = from_rank_zero(lambda: saved_shapes_in(path))
    if saved is None:
        return states
    others = {name: state for name, state in states.items() if name not in model_names}
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

    states = dict(states)
    for name, state in others.items():
        content = state.state_dict() if isinstance(state, Stateful) else state
        # The keys under which DCP stores the component.
        keys = set(torch_parts.flatten_states({name: content})[0])
        fitted = content
        if name == DATALOADER and (positions := _keys_of(DATALOADER, saved)):
            needs_all = getattr(state, "needs_all_positions", False)
            if needs_all or positions != set().union(*all_ranks(_keys_of(DATALOADER, keys))):
                # The dataloader gets the positions of all saving ranks and divides them again.
                fitted, keys = dict.fromkeys(positions), set()
        if name == TRAIN_STATE:
            newer = _KEYS_SINCE_FIRST_VERSION - _keys_of(TRAIN_STATE, saved)
            if newer & _keys_of(TRAIN_STATE, keys):
                fitted = {key: value for key, value in content.items() if key not in newer}
                keys -= {f"{TRAIN_STATE}.{key}" for key in newer}
        if fitted is not content:  # DCP reads the keys that it is shown
            load = state.load_state_dict
            states[name] = SimpleNamespace(state_dict=lambda f=fitted: f, load_state_dict=load)
        if missing := set().union(*all_ranks(keys - saved.keys())):
            raise ValueError(
                f"The checkpoint {path} lacks entries of {name}: {shorten(sorted(missing))}. "
                f"Add {name} to checkpoint.exclude_from_loading to load without it"
            )
    return states


def check_same_model(
    wanted: Shapes,
    saved: Shapes,
    path: str,
    model_description: str,
    remedy: str = "",
) -> None:
    """Compare the model's weights, of all ranks together, with the saved ones. Collective.

    Raises ValueError with the first names that are missing, superfluous or of another shape.
    """
    wanted = {name: shape for part in all_ranks(wanted) for name, shape in part.items()}
    keys = "model.name and model.flavor"
    if any(".lora_" in name for name in (*wanted, *saved)):
        keys = "model.converters and [lora] (rank, rank_pattern, target_modules, also_train)"
    remedy = remedy or f"Set {keys} to the saved model, or load another checkpoint"
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
            f"The checkpoint {path} does not fit {model_description}, the model of the config "
            f"({'; '.join(found)}). {remedy}"
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
    """The shapes in a DCP checkpoint; None if its metadata is missing or empty.

    The reference's tests use an empty file.
    """
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
    """The keys of one component, without the prefix."""
    return {key.removeprefix(f"{component}.") for key in keys if key.startswith(f"{component}.")}


def shorten(names: list[str]) -> str:
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    return ", ".join(names[:_KEYS_SHOWN]) + more
