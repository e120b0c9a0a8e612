"""The states of a run, their names in a checkpoint, and the check that a checkpoint fits the run.

Model entries are at the top level of a checkpoint under their parameter names. Checkpoints of LoRA
adapters lack the base model; they hold its name and a digest of all frozen parameters.
"""

import hashlib
import os
import pickle
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
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

from torchtitan.adapters.lora import adapted_weights, adapter_names, adapters_off, merged
from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import DCP_METADATA, mark_base
from torchtitan.checkpoint.stream import fingerprint
from torchtitan.config.job_config import LoRA
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.protocols.state_dict_adapter import DECAY, shorten
from torchtitan.tools import storage, torch_parts
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger
from torchtitan.tools.unpickling import read_plain

NAME, DIGEST = "base model", "base model's digest"  # keys in `run.json`
MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
USER_STATE = "user_state"
# States of `torchtitan.rl` and of embedding programs. Other runs load a checkpoint without them.
EXTRA_STATES = ("rl", "rl_reference", "rl_critic", "rl_generator", USER_STATE)

WEIGHTS_ONLY = (
    "the optimizer, step and data position start from zero. To continue from an earlier full "
    "checkpoint, name its step in checkpoint.load_step"
)

_NEW_KEY = "weights_version"  # key of the train state that checkpoints of torchtitan 0.2.x lack

# Name of an entry -> its shape; None if the entry is not a tensor.
Shapes = dict[str, tuple[int, ...] | None]


def with_model_on_top(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states, with the model's entries at the top level under their own names."""
    others = {name: state for name, state in states.items() if name != MODEL}
    return others | (states[MODEL].state_dict() if MODEL in states else {})


def live_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a full checkpoint; its tensors are the live tensors."""
    return {name: _entries_of(state) for name, state in with_model_on_top(states).items()}


def _entries_of(state: Any) -> Any:
    return state.state_dict() if isinstance(state, Stateful) else state


def cast_weights(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cast floating-point weights (our names) to `dtype`, except the decay parameters of linear attention."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and DECAY not in name else tensor
        for name, tensor in weights.items()
    }


def without_excluded(states: dict[str, Any], excluded: list[str]) -> dict[str, Any]:
    """Return the states that are neither excluded nor None; the dataloader may be None."""
    if unknown := [name for name in excluded if name not in states]:
        raise ConfigError(
            f"checkpoint.exclude_from_loading can hold {', '.join(states)}, got {unknown[0]!r}; "
            "correct or remove it"
        )
    return {n: state for n, state in states.items() if n not in excluded and state is not None}


class ModelWrapper(Stateful):
    """The live parameters and persistent buffers of all model parts, as one state dict.

    lora: the settings of the model's adapters, or None. With adapters, `state_dict()` returns only
    the trained parameters, without the frozen base.
    """

    def __init__(self, model: nn.Module | list[nn.Module], lora: LoRA | None = None) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self._lora = lora
        self.in_adapters = adapter_names(adapted_weights(self.model))
        self.trained = [
            torch_parts.name_without_wrappers(name)
            for part in self.model
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]
        self.base_name: str | None = None  # None if the weights are randomly initialised
        self._base_record: dict[str, str] | None = None

    def whole(self) -> dict[str, Any]:
        """Return all entries: the base model's and the adapters'."""
        entries: dict[str, Any] = {}
        for part in self.model:
            reshard_model(part)  # after an evaluation, FSDP may hold unsharded parameters
            entries |= get_model_state_dict(part)
        return entries

    cache_state_dict = property(whole)  # the name of `whole` in torchtitan 0.2.x

    def state_dict(self) -> dict[str, Any]:
        whole = self.whole()
        return whole if self._lora is None else {name: whole[name] for name in self.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each part's entries. A part skips the entries of other parts."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))

    def require_lora(self, wanted_by: str) -> LoRA:
        if self._lora is None:
            raise ValueError(
                f"{wanted_by} needs a model with adapters, and this one has none; build it with "
                "model.converters = ['lora']"
            )
        return self._lora

    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the model's entries with adapters merged; see `lora.merged`."""
        return self.whole() if self._lora is None else merged(self.whole(), self.model, dtype)

    def off(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.adapters_off`."""
        self.require_lora("adapters_off")
        if changed := [name for name in self.trained if name not in self.in_adapters]:
            raise ValueError(
                f"adapters_off would not give the base model, because {changed[0]} is trained in full; "
                "empty lora.also_train"
            )
        return adapters_off(self.model)

    @property
    def are_off(self) -> bool:
        """True inside a context that `off` returned."""
        modules = (module for part in self.model for module in part.modules())
        return self._lora is not None and any(getattr(m, "lora_n_off", 0) for m in modules)

    def base(self) -> dict[str, Any]:
        """Return the entries of the model without its adapters."""
        return {name: x for name, x in self.whole().items() if name not in self.in_adapters}

    def set_base(self, name: str) -> None:
        """Record the folder `name` that the base model was loaded from, and mark the folder. Collective."""
        self.base_name, self._base_record = name, None
        if self._lora is not None:
            from_rank_zero(lambda: mark_base(name))

    def own_base(self, model: str) -> dict[str, str]:
        """Return the base model's name (by default derived from `model`) and digest; {} without adapters."""
        if self._lora is None:
            return {}
        if self._base_record is None:
            frozen = {
                name: f"{t.dtype} {tuple(t.shape)} {fingerprint(t).item()}"  # gathers one tensor at a time
                for name, t in self.whole().items()
                if name not in self.trained
            }
            lines = {f"{key} {value}" for part in all_ranks(frozen) for key, value in part.items()}
            digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
            name = self.base_name or f"{model} with initial weights"
            self._base_record = {NAME: name, DIGEST: digest}
        return self._base_record

    def check_same_base(self, saved: Mapping[str, Any], path: str, model: str) -> None:
        """Raise ValueError if the adapters in `path` have another base model. saved: the record in `path`."""
        own = self.own_base(model)
        if DIGEST not in saved:
            logger.warning(f"{path} does not record its adapters' base model, so it is not checked")
        elif saved[DIGEST] != own[DIGEST]:
            name = str(saved.get(NAME))
            is_local = os.sep in name and not storage.is_address(name)
            is_gone = is_local and not from_rank_zero(lambda: os.path.exists(name))
            raise ValueError(
                f"The adapters in {path} were trained on another base model, {name}"
                f"{', which does not exist any more' if is_gone else ''} (digest {saved[DIGEST]}), got "
                f"{own[NAME]} (digest {own[DIGEST]}); set checkpoint.initial_load_path to their base"
            )


class UserState(Stateful):
    """Objects that an embedding program adds to checkpoints. One rank saves each object, pickled."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, name: str, state: Any) -> None:
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


def _pickled(name: str, state: Any) -> bytes:  # ValueError if a load would refuse the pickle
    content = torch_parts.pytree.tree_map_only(
        torch.Tensor, lambda x: x.detach().cpu(), state.state_dict()
    )
    data = pickle.dumps(content)
    read_plain(data, f"the state {name!r}, which checkpoints are to hold,")
    return data


def fit_to_checkpoint(
    states: dict[str, Any],
    all_states: Collection[str],
    model_names: Collection[str],
    saved: Shapes,
    path: str,
    model_description: str,
) -> dict[str, Any]:
    """Compare `states` with the checkpoint `path`; return their contents for DCP to load. Collective.

    states: the states to load; the model's entries, named `model_names`, are at the top level.
    all_states: names of all states of the run. saved: the entries of the checkpoint.
    Raises ValueError if the checkpoint lacks an entry or belongs to another model.
    """
    others = {name: state for name, state in states.items() if name not in model_names}
    weights = {name: state for name, state in states.items() if name in model_names}
    saved_others = keys_outside_model(saved, all_states)
    if others and not saved_others:
        logger.warning(f"{path} holds weights only: {WEIGHTS_ONLY}")
        others = {}
    left_out = {key.split(".")[0] for key in saved_others} - {*all_states}
    if others and (left_out := sorted(left_out.intersection(EXTRA_STATES))):
        logger.info(f"{path} also holds states that this run skips: {', '.join(left_out)}")

    contents = {name: _entries_of(state) for name, state in others.items()}
    if TRAIN_STATE in contents and f"{TRAIN_STATE}.{_NEW_KEY}" not in saved:
        contents[TRAIN_STATE] = {k: v for k, v in contents[TRAIN_STATE].items() if k != _NEW_KEY}
    # Component -> the keys under which DCP stores this rank's state.
    own_keys = {name: set(torch_parts.flatten_states({name: x})[0]) for name, x in contents.items()}
    positions = {key for key in saved if key.startswith(f"{DATALOADER}.")}
    of_ranks = all_ranks(
        (
            shapes_of(weights),
            {n: keys if n == DATALOADER else keys - saved.keys() for n, keys in own_keys.items()},
        )
    )
    if wanted := {name: shape for shapes, _ in of_ranks for name, shape in shapes.items()}:
        saved_weights = {key: saved[key] for key in saved.keys() - saved_others}
        check_same_model(wanted, saved_weights, path, model_description)
    for name, state in others.items():
        keys: set[str] = set().union(*(by_name[name] for _, by_name in of_ranks))
        if name == DATALOADER and positions:
            if getattr(state, "needs_all_positions", False) or positions != keys:
                # The dataloader gets the data positions of all saving ranks and redistributes them.
                contents[name] = {key.removeprefix(f"{DATALOADER}."): None for key in positions}
            keys = set()
        if missing := sorted(keys - saved.keys()):
            raise ValueError(
                f"The checkpoint {path} lacks entries of {name}: {shorten(missing)}. "
                f"Add {name} to checkpoint.exclude_from_loading to load without it"
            )
    return weights | contents


def check_same_model(
    wanted: Shapes, saved: Shapes, path: str, model_description: str, remedy: str = ""
) -> None:
    """Raise ValueError unless `wanted` (entries of all ranks) and `saved` have equal names and shapes."""
    keys = "model.name and model.flavor"
    if any(".lora_" in name for name in (*wanted, *saved)):
        keys = "model.converters and [lora] (rank, rank_pattern, target_modules, also_train, base_format)"
    remedy = remedy or f"Set {keys} to the saved model, or load another checkpoint"
    differences = {
        "not in the checkpoint": sorted(wanted.keys() - saved.keys()),
        "not in the model": sorted(saved.keys() - wanted.keys()),
        "of another shape": [
            f"{name}: saved {list(saved[name] or ())}, model {list(wanted[name] or ())}"
            for name in sorted(wanted.keys() & saved.keys())
            if wanted[name] != saved[name]
        ],
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
    """Return the shapes in a DCP checkpoint; None if it has no `.metadata` or an empty one."""
    found = storage.stat(storage.join(path, DCP_METADATA))
    if found is None or found.st_size == 0:
        return None
    return saved_shapes(dcp.SafeReader(path))


def keys_outside_model(saved: Shapes, states: Iterable[str] = ()) -> set[str]:
    components = {OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, *EXTRA_STATES, *states}
    return {key for key in saved if key.split(".")[0] in components - {MODEL}}
