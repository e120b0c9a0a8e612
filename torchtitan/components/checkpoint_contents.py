"""What a checkpoint holds beside what a model wants; weights in Hugging Face files.

Functions said to be collective must be called by every rank.
"""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan.components.checkpoint_folder import (
    DCP_METADATA,
    HF_INDEX,
    Contents,
    all_ranks,
    contents_of,
    find_damage,
    finish_writing,
    from_rank_zero,
    hash_over_ranks,
    start_writing,
)
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"

_CONSOLIDATION_THREADS = 5
_KEYS_SHOWN = 5

# Name of an entry -> its shape, or None when it is not a tensor.
Shapes = dict[str, tuple[int, ...] | None]


# Hugging Face format


def load_from_hf(
    state_dict: dict[str, Any],
    adapter: "BaseStateDictAdapter",
    path: str,
    from_quantized: bool = False,
    model_description: str = "the model",
) -> dict[str, Any]:
    """The weights in the safetensors files under `path`, under our names. Collective.

    state_dict: the model's own entries; they tell which tensors are wanted.
    Raises ValueError if the two sides do not match.
    """
    reader = adapter.get_hf_storage_reader(path, from_quantized)
    saved = from_rank_zero(lambda: _saved_shapes(reader))
    if not saved:
        raise ValueError(
            f"There are no safetensors files in {path}, from where Hugging Face weights are "
            "to be read; correct the path, or turn checkpoint.initial_load_in_hf off"
        )
    adapter = adapter.spelled_like(saved)
    wanted = adapter.to_hf(state_dict)
    if not from_quantized:  # quantized files have other shapes, and scales beside the weights
        ignored = {name for name in saved if adapter.ignores_hf_key(name)} - wanted.keys()
        if ignored:
            logger.info(f"Without a place in the model, not read: {_shorten(sorted(ignored))}")
        relevant = {name: shape for name, shape in saved.items() if name not in ignored}
        check_same_model(wanted, relevant, path, model_description)
    with one_error(f"The safetensors files in {path} could not be read"):
        dcp.load(wanted, storage_reader=reader)
    loaded = adapter.from_hf(wanted)
    if kept := sorted(state_dict.keys() - loaded.keys()):
        logger.warning(f"Not in {path}, left as they are: {_shorten(kept)}")
    return loaded


def save_to_hf(state_dict: dict[str, Any], adapter: "BaseStateDictAdapter", folder: str) -> None:
    """Write the model to safetensors files with an index. Collective.

    The shards are those of `hf_assets_path` where the adapter knows them, else one file. Every
    rank first writes its own part to `<folder>/sharded`.
    """
    # An adapter may give views with rows and columns swapped, which the format has no word for.
    state_dict = {name: t.contiguous() for name, t in adapter.to_hf(state_dict).items()}
    from_rank_zero(lambda: start_writing(folder))
    if adapter.fqn_to_index_mapping:
        sharded = os.path.join(folder, "sharded")
        file_index = _file_index(state_dict, adapter.fqn_to_index_mapping)
        writer = HuggingFaceStorageWriter(
            path=sharded,
            save_distributed=True,
            fqn_to_index_mapping=file_index,
            enable_consolidation=False,
        )
        dcp.save(state_dict, storage_writer=writer, checkpoint_id=None)
        _consolidate(sharded, folder, file_index)
    else:
        writer = HuggingFaceStorageWriter(
            path=folder, save_distributed=True, enable_consolidation=True
        )
        dcp.save(state_dict, storage_writer=writer, checkpoint_id=None)
    names = from_rank_zero(lambda: _hf_files(folder))
    hashes = hash_over_ranks(folder, names)
    from_rank_zero(lambda: finish_writing(folder, hashes))
    logger.info(f"Wrote {len(names)} Hugging Face files to {folder}")


def _hf_files(folder: str) -> list[str]:
    return [n for n in os.listdir(folder) if n.endswith(".safetensors") or n == HF_INDEX]


def _file_index(state_dict: dict[str, Any], known: dict[str, int]) -> dict[str, int]:
    """HF name -> number of its shard, for exactly the tensors that any rank has."""
    names = sorted({name for part in all_ranks(list(state_dict)) for name in part})
    if unknown := [name for name in names if name not in known]:
        # Not an error: it would come at the end of the training and cost its result.
        logger.warning(
            f"The index under model.hf_assets_path does not list {_shorten(unknown)}; "
            "writing them into the last file"
        )
    last = max(known.values())
    return {name: known.get(name, last) for name in names}


def _consolidate(sharded: str, folder: str, file_index: dict[str, int]) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
        consolidate_safetensors_files_on_every_rank,
    )

    # Without a process group the function for every rank would leave the index file out.
    consolidate = (
        consolidate_safetensors_files_on_every_rank
        if dist.is_initialized()
        else consolidate_safetensors_files
    )
    consolidate(
        input_dir=sharded,
        output_dir=folder,
        fqn_to_index_mapping=file_index,
        num_threads=_CONSOLIDATION_THREADS,
    )


# Weights alone, for conversions


def zero_weights(model_cls: type[nn.Module], model_args: Any) -> dict[str, Any]:
    """The state dict of a model, all zeros and on the CPU, without the cost of initialising it."""
    with torch.device("meta"):
        model = model_cls(model_args)
    weights = get_model_state_dict(model)
    return {name: torch.zeros_like(tensor, device="cpu") for name, tensor in weights.items()}


def prepare_conversion(
    model_name: str, model_flavor: str, hf_assets_path: str | None = None
) -> tuple[dict[str, Any], "BaseStateDictAdapter"]:
    """Zero weights of a flavor, to read into, and the adapter to convert them with.

    Raises ValueError for an unknown model or flavor, or one without an adapter.
    """
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(model_name)
    if model_flavor not in spec.model_args:
        raise ValueError(
            f"{model_name} has no flavor {model_flavor!r}; it has {', '.join(spec.model_args)}"
        )
    if spec.state_dict_adapter is None:
        raise ValueError(f"{model_name} has no state_dict_adapter, so nothing to convert with")
    model_args = spec.model_args[model_flavor]
    weights = zero_weights(spec.model_cls, model_args)
    return weights, spec.state_dict_adapter(model_args, hf_assets_path)


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
    check_same_model(weights, saved_weights, path, model_description)
    with one_error(f"The checkpoint {path} could not be read"):
        dcp.load(weights, checkpoint_id=path)


# What a checkpoint holds, and what the model wants


def _shapes_of(state_dict: dict[str, Any]) -> Shapes:
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in state_dict.items()
    }


def _saved_shapes(reader: StorageReader) -> Shapes:
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
    return _saved_shapes(dcp.FileSystemReader(path))


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


def check_same_model(
    weights: dict[str, Any], saved: Shapes, path: str, model_description: str
) -> None:
    """Compare the weights that all ranks together want with those that are saved. Collective."""
    wanted = {k: shape for part in all_ranks(_shapes_of(weights)) for k, shape in part.items()}
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
    found = [f"{what}: {_shorten(keys)}" for what, keys in differences.items() if keys]
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
            f"The checkpoint {path} lacks entries of {component}: {_shorten(sorted(missing))}. "
            f"Add {component} to checkpoint.exclude_from_loading to load without it"
        )


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    return ", ".join(names[:_KEYS_SHOWN]) + more


@contextmanager
def one_error(what: str) -> Generator[None, None, None]:
    """Turn DCP's exception, a BaseException that quotes every rank's stack, into one sentence."""
    try:
        yield
    except dcp.CheckpointException as error:
        reasons = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        raise RuntimeError(f"{what} (on rank {ranks}): {'; '.join(sorted(reasons))}") from error
