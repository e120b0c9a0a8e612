"""Converts weights on the CPU, without a training engine."""

import logging
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import (
    GIB,
    UNFINISHED_MARKER,
    WEIGHT_FILES,
    HashingWriter,
    upload_folder,
)
from torchtitan.checkpoint.hf import load_from_hf
from torchtitan.checkpoint.hf_assets import NAMED_TEMPLATES
from torchtitan.checkpoint.selection import at_path
from torchtitan.checkpoint.states import check_same_model, keys_outside_model, shapes_of
from torchtitan.models.hf_config import from_hf_config
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, shorten
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import storage
from torchtitan.tools.host import total_ram_bytes
from torchtitan.tools.logging import logger


def zero_weights(model_cls: type[nn.Module], model_args: Any) -> dict[str, Any]:
    """Return a model's state dict of zeros on the CPU; ValueError for an invalid or too large model."""
    try:
        with torch.device("meta"):
            model = model_cls(model_args)
    except RuntimeError as error:  # sizes that do not fit together, or whose product overflows
        raise ValueError(f"A model of these sizes cannot be built: {error}") from error
    weights = model.state_dict(keep_vars=True)
    distinct = {id(weight): weight for weight in weights.values()}
    n_bytes = sum(weight.nbytes for weight in distinct.values())
    memory = total_ram_bytes()
    if memory and n_bytes > memory:
        raise ValueError(
            f"The weights of this model take {n_bytes / GIB:.1f} GiB in fp32, and this machine has "
            f"{memory / GIB:.1f} GiB of memory"
        )
    zeros = {key: torch.zeros_like(w.detach(), device="cpu") for key, w in distinct.items()}
    return {name: zeros[id(weight)] for name, weight in weights.items()}  # tied weights stay tied


def prepare_conversion(
    model_name: str,
    model_flavor: str,
    hf_assets_path: str | None = None,
    hf_config: str | None = None,
    spec: TrainSpec | None = None,
) -> tuple[dict[str, Any], BaseStateDictAdapter, str]:
    """Return (zero weights to load into, the adapter that converts them, a description of the model).

    hf_config: path of a config.json or its folder, which replaces model_name and model_flavor; an
        export copies config.json and the tokenizer from there. spec: replaces the registered spec.
    Raises ValueError if the model or flavor is unknown, or if the model has no adapter.
    """
    model_args = None
    description = f"{model_name} {model_flavor}"
    if hf_config is not None:
        model_name, _, model_args = from_hf_config(hf_config)
        description = f"the {model_name} model of {hf_config}"
        hf_assets_path = hf_config if os.path.isdir(hf_config) else os.path.dirname(hf_config)
    spec = spec or get_train_spec(model_name)
    if model_args is None and model_flavor not in spec.model_args:
        raise ValueError(
            f"{model_name} has no flavor {model_flavor!r}; it has {', '.join(spec.model_args)}"
        )
    if spec.state_dict_adapter is None:
        raise ValueError(f"{model_name} cannot be converted: it has no state_dict_adapter")
    model_args = model_args or spec.model_args[model_flavor]
    weights = zero_weights(spec.model_cls, model_args)
    return weights, spec.state_dict_adapter(model_args, hf_assets_path), description


def load_weights(weights: dict[str, Any], path: str, model_description: str) -> None:
    """Load the model's entries of a DCP checkpoint into `weights`, in place. Collective.

    Raises ValueError if `path` is not a complete checkpoint of this model.
    """
    if (saved := at_path(path, "the checkpoint", verify=True).shapes) is None:
        raise ValueError(f"{path} is not the folder of a finished checkpoint")
    saved_weights = {key: saved[key] for key in saved.keys() - keys_outside_model(saved)}
    check_same_model(shapes_of(weights), saved_weights, path, model_description)
    with dcp.one_error(f"The checkpoint {path} could not be read"):
        dcp.load(weights, checkpoint_id=path)


@torch.no_grad()
def convert_from_hf(
    input_dir: str,
    output_dir: str,
    model_name: str,
    model_flavor: str,
    hf_config: str | None = None,
    overwrite: bool = False,
    spec: TrainSpec | None = None,
) -> None:
    """Read the safetensors files in `input_dir`, write a checkpoint to `output_dir`. On the CPU.

    hf_config: a config.json that describes the model; replaces name and flavor.
    spec: replaces the registered train spec of `model_name`.
    overwrite: replace weights in `output_dir`; False requires an empty folder.
    Raises ValueError if the files do not belong to this model and flavor.
    """
    with replacing(output_dir, overwrite, [input_dir]) as folder:
        weights, adapter, description = prepare_conversion(
            model_name, model_flavor, hf_config=hf_config, spec=spec
        )
        chosen = None if hf_config or spec else ()
        load_from_hf(weights, adapter, storage.fetched(input_dir), False, description, chosen)
        with dcp.one_error(f"The checkpoint {output_dir} could not be written"):
            dcp.save(weights, storage_writer=HashingWriter(folder), checkpoint_id=folder)
    logger.info(f"Wrote {output_dir}")


@contextmanager
def replacing(folder: str, overwrite: bool, sources: Iterable[str]) -> Generator[str, None, None]:
    """Yield a new folder to write to. It replaces `folder` once the block has ended without error.

    overwrite: allow `folder` to hold files. Its weights are replaced, its other files are copied.
    sources: folders that the block reads; `folder` must neither contain one of them nor be inside one.
    If the block fails, `folder` stays as it was. Log lines of the block name `folder`, not the new folder.
    If `folder` is an address, the new folder is uploaded there, and replaces all weights and files of the
    same names. Raises ValueError or OSError.
    """
    where = storage.resolved(folder)
    for source in map(storage.resolved, sources):
        if f"{where}/".startswith(f"{source}/") or f"{source}/".startswith(f"{where}/"):
            raise ValueError(
                f"{folder} cannot be written while {source} is read, because one is inside the other; "
                "give another folder to write to"
            )
    if storage.is_file(where):
        raise ValueError(f"{where} is a file; give a folder to write to")
    if not overwrite and (names := storage.names_in(where)):
        raise ValueError(
            f"{where} holds files already ({shorten(sorted(names))}); give "
            "another folder, or --overwrite to replace the weights in it"
        )
    if storage.is_address(folder):
        storage.check_writable(folder)
        shutil.rmtree(staged := storage.staging_folder(folder), ignore_errors=True)
        with replacing(staged, True, ()) as unfinished:
            yield unfinished
        upload_folder(staged, folder)
        shutil.rmtree(staged)
        return
    target = Path(where)
    entries = list(target.iterdir()) if target.exists() else []
    folders = [e.name for e in entries if e.is_dir() and e.name != NAMED_TEMPLATES]
    if folders or target.is_mount():
        what = f"holds folders ({shorten(sorted(folders))})" if folders else "is a mounted volume"
        raise ValueError(f"{target} {what}, so it is not replaced; give another folder")
    beside = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    before = target.with_name(f"{target.name}.before-{os.getpid()}")
    beside.mkdir(parents=True)

    def name_target(record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(str(beside), str(target)), ()
        return True

    logger.addFilter(name_target)
    try:
        for file in entries:
            if file.is_dir():
                shutil.copytree(file, Path(beside, file.name), symlinks=True)
            elif not any(file.match(pattern) for pattern in (UNFINISHED_MARKER, *WEIGHT_FILES)):
                shutil.copy2(file, beside, follow_symlinks=False)
        yield str(beside)
        if target.exists():
            target.rename(before)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        if before.exists() and not target.exists():
            before.rename(target)
        raise
    finally:
        logger.removeFilter(name_target)
    shutil.rmtree(before, ignore_errors=True)
