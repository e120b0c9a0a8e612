"""Weights in Hugging Face files: safetensors, with an index of which tensor stands in which file.

A model is read and written part by part, so that translating layouts needs memory for the copies
of one part only.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint import _consolidate_hf_safetensors as torch_hf
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import (
    HF_INDEX,
    HashedFile,
    finish_writing,
    hash_over_ranks,
    path_inside,
    start_writing,
)
from torchtitan.checkpoint.hf_assets import write_model_files
from torchtitan.checkpoint.states import (
    Shapes,
    check_same_model,
    saved_shapes,
    shapes_of,
    shorten,
)
from torchtitan.distributed.dtensor import is_dtensor, local_tensor
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero, on_all_ranks
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, read_weight_map
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger

_CONSOLIDATION_THREADS = 5
_BYTES_PER_PART = 2**28
_BYTES_PER_FILE = 5 * 10**9  # as transformers has it

# Reading


def load_from_hf(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    path: str,
    from_quantized: bool = False,
    model_description: str = "the model",
) -> dict[str, Any]:
    """Read the safetensors files under `path` into the tensors of `state_dict`. Collective.

    state_dict: the model's own entries. Returns those that were read.
    Raises ValueError if the two sides do not match.
    """
    missing_files = from_rank_zero(lambda: check_files(path))
    reader = adapter.get_hf_storage_reader(path, from_quantized)
    try:
        metadata = reader.read_metadata()
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"The safetensors files in {path} cannot be read: what stands beside their tensors, "
            f"about parts or scales of them, is damaged ({type(error).__name__}: {error})"
        ) from error
    if not from_quantized:  # whose tensors are larger than what is stored
        dcp.check_chunks(metadata, path)
    reader.read_metadata = lambda *args, **kwargs: metadata  # else DCP reads it for every part
    saved = from_rank_zero(lambda: saved_shapes(reader))
    if problem := adapter.problem_with(saved):
        raise ValueError(f"{path} cannot be read: {problem}")
    adapter = adapter.spelled_like(saved)
    parts = list(_parts_of(state_dict))
    parts += [{}] * (max(all_ranks(len(parts))) - len(parts))
    if not from_quantized:  # quantized files have other shapes, and scales beside the weights
        wanted: Shapes = {}
        for part in parts:
            hf_part = adapter.to_hf(part)
            dcp.check_same_kinds(hf_part, metadata)
            wanted |= shapes_of(hf_part)
        ignored = {name for name in saved if adapter.ignores_hf_key(name)} - wanted.keys()
        if ignored:
            logger.info(f"Without a place in the model, not read: {shorten(sorted(ignored))}")
        relevant = {name: shape for name, shape in saved.items() if name not in ignored}
        try:
            check_same_model(wanted, relevant, path, model_description)
        except ValueError as error:
            if not missing_files:
                raise
            raise ValueError(
                f"{path} is not whole: {HF_INDEX} names files that are missing: "
                f"{shorten(missing_files)}; fetch them. {error}"
            ) from error
    loaded = {}
    for part in parts:
        hf_part = adapter.to_hf(part)
        with dcp.one_error(f"The safetensors files in {path} could not be read"):
            dcp.load(hf_part, storage_reader=reader)
        for name, tensor in adapter.from_hf(hf_part).items():
            if name in state_dict:
                target = loaded[name] = state_dict[name]
                ours, theirs = local_tensor(target), local_tensor(tensor)
                if (ours.data_ptr(), ours.stride()) != (theirs.data_ptr(), theirs.stride()):
                    target.copy_(tensor)
    if kept := sorted(state_dict.keys() - loaded.keys()):
        logger.warning(f"Not in {path}, left as they are: {shorten(kept)}")
    return loaded


def check_files(folder: str) -> list[str]:
    """The files that the index names and that are missing.

    Raises ValueError, naming the file, if one is damaged or leads out of `folder`. Reads headers
    only: safetensors bounds their size, and sees that tensors neither overlap nor end beyond the
    file.
    """
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not names:
        raise ValueError(
            f"There are no safetensors files in {folder}, from where Hugging Face weights are "
            "to be read; correct the path, or turn checkpoint.initial_load_in_hf off"
        )
    file_of: dict[str, str] = {}
    for name in names:
        path = path_inside(folder, name)
        if not os.path.isfile(path):  # opening a pipe would wait
            raise ValueError(f"{path} is not a regular file; put the file itself there")
        try:
            with safe_open(path, framework="pt") as file:
                names_inside = file.keys()
                kinds = {key: file.get_slice(key).get_dtype() for key in names_inside}
                is_sharded = CUSTOM_METADATA_KEY in (file.metadata() or {})
        except Exception as error:  # the library has its own kind for each thing that it reads
            raise ValueError(
                f"{path} is not a safetensors file, or only a part of one ({error}); fetch it again"
            ) from error
        if unknown := [f"{kind} of {key}" for key, kind in kinds.items() if kind not in _TYPES]:
            raise ValueError(f"{path} has numbers that cannot be read: {shorten(unknown)}")
        for key in kinds if not is_sharded else ():
            if key in file_of:
                raise ValueError(
                    f"{folder} has {key} twice, in {file_of[key]} and in {name}; remove one of the "
                    "files, or each that its index does not name"
                )
            file_of[key] = name
    index = os.path.join(folder, HF_INDEX)
    if not os.path.lexists(index):
        return []
    return sorted(set(read_weight_map(path_inside(folder, HF_INDEX)).values()) - set(names))


def _parts_of(state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries in parts of bounded size. Those of one module stay together, for adapters join
    some of them; ranks that share tensors cut at the same places, for adapters gather some."""
    part: dict[str, Any] = {}
    n_bytes, module = 0, None
    for name, tensor in state_dict.items():
        if n_bytes >= _BYTES_PER_PART and name.rpartition(".")[0] != module:
            yield part
            part, n_bytes = {}, 0
        part[name] = tensor
        n_ranks = 1  # counted as if the shards were all of one size, so the same on every rank
        if is_dtensor(tensor):
            for axis, placement in enumerate(tensor.placements):
                n_ranks *= 1 if placement.is_replicate() else tensor.device_mesh.size(axis)
        n_bytes += tensor.nbytes // n_ranks
        module = name.rpartition(".")[0]
    if part:
        yield part


# Writing


def save_to_hf(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    folder: str,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> None:
    """Write the model to safetensors files with an index. Collective.

    dtype: what floating-point tensors are cast to; None keeps each one's own.
    tokenizer: see `hf_assets.write_model_files`.
    The files are those of `hf_assets_path` where the adapter knows them, else as few as hold
    5 GB each. Ranks first write their own parts to `<folder>/sharded`, which is removed. Beside the
    weights come config.json, generation_config.json and tokenizer files, so that `transformers`
    opens the folder; see `hf_assets.write_model_files`.
    """
    if left_out := _left_out(state_dict, adapter):
        logger.warning(
            f"Hugging Face files have no place for {shorten(left_out)}: a model loaded from {folder} "
            "computes something else. A flavor with moe_args.load_balance_coeff = None trains "
            "without expert_bias"
        )
    from_rank_zero(lambda: start_writing(folder))
    if dist.is_initialized():
        _write_over_ranks(_to_hf(state_dict, adapter, dtype), adapter, folder)
        names = from_rank_zero(lambda: os.listdir(folder))
        names = [name for name in names if name.endswith(".safetensors") or name == HF_INDEX]
        hashes = hash_over_ranks(folder, names)
    else:
        hashes = _write_alone(state_dict, adapter, folder, dtype)

    def write_the_rest() -> None:
        if (model_args := getattr(adapter, "model_args", None)) is not None:
            kinds = [t.dtype for t in state_dict.values() if t.is_floating_point()]
            most_used = dtype or max(kinds, key=kinds.count)
            assets = adapter.hf_assets_path
            write_model_files(folder, model_args, assets, most_used, tokenizer)
        finish_writing(folder, hashes)

    from_rank_zero(write_the_rest)
    logger.info(f"Wrote {len(hashes)} Hugging Face files to {folder}")


def _left_out(state_dict: dict[str, Any], adapter: BaseStateDictAdapter) -> list[str]:
    """Buffers of any rank that have no HF name and are not zero. Zeros change nothing."""
    has_name = {name for names in adapter.groups_of(state_dict) for name in names}
    left_out = [
        name
        for name, tensor in state_dict.items()
        if name not in has_name and name.endswith(".expert_bias") and local_tensor(tensor).any()
    ]
    return sorted({name for part in all_ranks(left_out) for name in part})


def _to_hf(
    part: dict[str, Any], adapter: BaseStateDictAdapter, dtype: torch.dtype | None
) -> dict[str, Any]:
    tensors = adapter.to_hf(part)
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point():
            tensors[name] = tensor.to(dtype)
    return tensors


def _file_index(sizes: dict[str, int], known: dict[str, int] | None) -> dict[str, int]:
    """HF name -> number of its file, for exactly the tensors that any rank has.

    sizes: bytes of the tensors of this rank.
    """
    sizes = {name: n for part in all_ranks(sizes) for name, n in part.items()}
    if known:
        if unknown := [name for name in sizes if name not in known]:
            # Not an error: it would come at the end of the training and cost its result.
            logger.warning(
                f"The index under model.hf_assets_path does not list {shorten(sorted(unknown))}; "
                "writing them into the last file"
            )
        last = max(known.values())
        return {name: known.get(name, last) for name in sizes}
    index, number, n_bytes = {}, 1, 0
    for name, size in sizes.items():
        if n_bytes and n_bytes + size > _BYTES_PER_FILE:
            number, n_bytes = number + 1, 0
        index[name] = number
        n_bytes += size
    return index


def _write_over_ranks(tensors: dict[str, Any], adapter: BaseStateDictAdapter, folder: str) -> None:
    # An adapter may give views with rows and columns swapped, which the format has no word for.
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    file_index = _file_index(sizes, adapter.fqn_to_index_mapping)
    sharded = os.path.join(folder, "sharded")
    writer = HuggingFaceStorageWriter(
        path=sharded,
        save_distributed=True,
        fqn_to_index_mapping=file_index,
        enable_consolidation=False,
    )
    dcp.save(tensors, storage_writer=writer, checkpoint_id=None)
    rank, n_ranks, n_files = dist.get_rank(), dist.get_world_size(), max(file_index.values())

    def join_own_files() -> dict[str, Any]:
        """Each rank joins some of the files. In torch's function for that the others wait for ever
        for a rank that fails."""
        own = {
            name: torch_hf._gen_file_name(number, n_files)
            for name, number in file_index.items()
            if number % n_ranks == rank
        }
        if not own:
            return {}
        return torch_hf._consolidate_safetensors_files(
            sharded, folder, own, num_threads=_CONSOLIDATION_THREADS
        )

    written = {path: data for part in on_all_ranks(join_own_files) for path, data in part.items()}
    from_rank_zero(lambda: torch_hf._write_overall_metadata_file(folder, written))
    from_rank_zero(lambda: shutil.rmtree(sharded))


def _write_alone(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    folder: str,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Write every tensor straight to its file; returns file name -> SHA-256.

    A header says where each tensor stands, so all tensors are translated twice: once for their
    sizes, and once to be written.
    """
    name_of = {dtype: name for name, dtype in _TYPES.items()}
    entries: dict[str, tuple[str, list[int], int]] = {}
    for part in _parts_of(state_dict):
        for name, tensor in _to_hf(part, adapter, dtype).items():
            entries[name] = name_of[tensor.dtype], list(tensor.shape), tensor.nbytes
    sizes = {name: n_bytes for name, (_, _, n_bytes) in entries.items()}
    file_index = _file_index(sizes, adapter.fqn_to_index_mapping)
    n_files = max(file_index.values())
    weight_map = {name: torch_hf._gen_file_name(n, n_files) for name, n in file_index.items()}
    with ExitStack() as stack:
        files = {}
        for file_name in sorted(set(weight_map.values())):
            names = [name for name in weight_map if weight_map[name] == file_name]
            file = HashedFile(stack.enter_context(open_file(os.path.join(folder, file_name), "wb")))
            file.write(_safetensors_header({name: entries[name] for name in names}))
            files[file_name] = file, iter(names)
        for part in _parts_of(state_dict):
            for name, tensor in _to_hf(part, adapter, dtype).items():
                file, names = files[weight_map[name]]
                assert name == next(names), f"{name} comes in another order than in the header"
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(data.numpy())
        hashes = {file_name: file.hexdigest() for file_name, (file, _) in files.items()}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    with open_file(os.path.join(folder, HF_INDEX), "wb") as file:
        index_file = HashedFile(file)
        index_file.write(json.dumps(index, indent=2).encode())
    return hashes | {HF_INDEX: index_file.hexdigest()}


def _safetensors_header(entries: dict[str, tuple[str, list[int], int]]) -> bytes:
    """What a safetensors file begins with; the tensors follow, in this order.

    entries: name -> dtype, shape, bytes. The format: 8 bytes with the length of the JSON that
    follows, then the tensors one after another.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, n_bytes) in entries.items():
        end = offset + n_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return struct.pack("<Q", len(text)) + text
