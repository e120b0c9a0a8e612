"""Weights in Hugging Face files: safetensors, with an index that names the file of each tensor.

A model is read and written in parts, which bounds the memory for converted copies of tensors.
"""

import io
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import HF_INDEX, HashedFile, finish_writing, start_writing
from torchtitan.checkpoint.hf_assets import (
    DTYPES,
    SCALE,
    UntrainedParts,
    are_quantized,
    check_files,
    differences_from_config,
    write_json,
    write_model_files,
)
from torchtitan.checkpoint.states import (
    Shapes,
    cast_weights,
    check_same_model,
    saved_shapes,
    shapes_of,
)
from torchtitan.checkpoint.stream import bytes_of
from torchtitan.distributed.dtensor import is_dtensor, local_tensor, whole_tensor, with_local
from torchtitan.distributed.processes.ranks import (
    all_ranks,
    from_rank_zero,
    on_all_ranks,
    ranks_of_first_machine,
)
from torchtitan.numerics import nf4
from torchtitan.protocols.state_dict_adapter import (
    BaseStateDictAdapter,
    shorten,
    to_template,
)
from torchtitan.tools.files import regular_file
from torchtitan.tools.logging import logger

_BYTES_PER_PART = 2**28
_ROWS_COMPARED = 4096
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES_PER_FILE = 5 * 10**9  # like transformers' max_shard_size


def load_from_hf(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    path: str,
    from_quantized: bool = False,
    model_description: str = "the model",
    chosen_args: Collection[str] | None = (),
    untrained_weights: str = "drop",
) -> dict[str, Any]:
    """Read the safetensors files under `path` into the tensors of `state_dict`. Collective.

    state_dict: the model's own entries. Returns the entries that were read.
    chosen_args: model args that may differ from config.json in `path`; None: all may, with a warning.
    untrained_weights: the setting `checkpoint.untrained_weights`.
    Raises ValueError if files, their config.json and the model do not match.
    """
    (names, missing_files), difference = from_rank_zero(
        lambda: (check_files(path), differences_from_config(adapter, path))
    )
    reader = _open_reader(adapter, path, names, from_quantized)
    metadata, saved = reader.read_metadata(), saved_shapes(reader)
    adapter = adapter.spelled_like(saved)
    parts = list(_parts_of(state_dict, adapter))

    def shapes_here() -> tuple[int, Shapes]:
        shapes: Shapes = {}
        for part in parts:
            hf_part = adapter.to_hf(_numbers_of(part))
            if not from_quantized:
                dcp.check_same_kinds(hf_part, metadata)
            shapes |= shapes_of(hf_part)
        return len(parts), shapes

    of_ranks = on_all_ranks(shapes_here)
    wanted = {name: shape for _, shapes in of_ranks for name, shape in shapes.items()}
    parts += [{}] * (max(n_parts for n_parts, _ in of_ranks) - len(parts))

    ignored = {name for name in saved if adapter.ignores_hf_key(name)} - wanted.keys()
    _check_ignored(ignored, adapter, metadata, path, untrained_weights)
    relevant = {name: shape for name, shape in saved.items() if name not in ignored}
    if from_quantized:
        fp8 = [n for n, e in metadata.state_dict_metadata.items() if e.properties.dtype in _FP8]
        if no_scale := sorted(n for n in fp8 if f"{n}{SCALE}" not in saved):
            raise ValueError(f"{path} cannot be read: it has no scales for {shorten(no_scale)}")
        scales = {f"{name}{SCALE}" for name in wanted} - wanted.keys()
        relevant = {name: shape for name, shape in relevant.items() if name not in scales}
    remedy = _remedy(relevant, missing_files, difference)
    check_same_model(wanted, relevant, path, model_description, remedy)
    _check_config(difference or {}, chosen_args, path)
    loaded = {}
    for part in parts:
        numbers = _numbers_of(part)
        hf_part = adapter.to_hf(numbers)
        with dcp.one_error(f"The safetensors files in {path} could not be read"):
            dcp.load(hf_part, storage_reader=reader)
        for name, tensor in adapter.from_hf(hf_part).items():
            if name in state_dict:
                loaded[name] = state_dict[name]
                target = numbers.get(name, state_dict[name])
                ours, theirs = local_tensor(target), local_tensor(tensor)
                if (ours.data_ptr(), ours.stride()) != (theirs.data_ptr(), theirs.stride()):
                    target.copy_(tensor)
                if target is not state_dict[name]:
                    local_tensor(state_dict[name]).copy_(nf4.quantize(ours))
    if kept := sorted(state_dict.keys() - loaded.keys()):
        logger.warning(f"Not in {path}, so left unchanged: {shorten(kept)}")
    return loaded


def _numbers_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the entries, with uninitialised fp32 tensors in place of 4-bit matrices."""
    return {
        name: with_local(tensor, nf4.empty_numbers(local_tensor(tensor)))
        if tensor.dtype == torch.uint8
        else tensor
        for name, tensor in part.items()
    }


def _open_reader(
    adapter: BaseStateDictAdapter, path: str, names: list[str], from_quantized: bool
) -> Any:
    reader = adapter.get_hf_storage_reader(path, from_quantized)
    if file_system := getattr(reader, "fs", None):
        file_system.ls = lambda folder: [os.path.join(folder, name) for name in names]
    try:
        metadata = reader.read_metadata()
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"The safetensors files in {path} cannot be read: their metadata, which describes "
            f"shards or scales of the tensors, is damaged ({type(error).__name__}: {error})"
        ) from error
    if not from_quantized:  # tensors to dequantize may be stored in another shape
        dcp.check_chunks(metadata, path)
    reader.read_metadata = lambda *args, **kwargs: metadata  # cached: DCP reads it for each part
    return reader


def _remedy(
    saved: Iterable[str], missing_files: list[str], difference: dict[str, Any] | None
) -> str:
    """Return advice for weights that do not fit, or "". difference: see `differences_from_config`."""
    if missing_files:
        return f"{HF_INDEX} names files that are missing: {shorten(missing_files)}; fetch them"
    if are_quantized(saved):
        return "The weights are quantized: set checkpoint.initial_load_in_hf_quantized = true"
    if difference != {}:
        return ""
    return (
        "The config.json beside the weights describes this model: fetch all files again, or correct "
        "config.json (vocab_size, or tie_word_embeddings if only lm_head.weight is missing)"
    )


def _check_config(
    difference: Mapping[str, tuple[Any, Any]], chosen_args: Collection[str] | None, path: str
) -> None:
    """Raise ValueError if config.json differs from the model in a field that the user did not set."""
    if found := [
        f"{name} = {theirs}, not {ours}"
        for name, (ours, theirs) in difference.items()
        if name not in (chosen_args or ())
    ]:
        sentence = f"{path} has weights of a model with {', '.join(found)} (its config.json)"
        if chosen_args is not None:
            raise ValueError(
                f"{sentence}; set model.hf_config = {path!r} to take its values, or set those fields "
                "in model.args"
            )
        logger.warning(f"{sentence}: the run's values are used")


def _check_ignored(
    names: Collection[str],
    adapter: BaseStateDictAdapter,
    metadata: Any,
    path: str,
    untrained_weights: str,
) -> None:
    """Log the tensors that are not loaded. Raises ValueError if `untrained_weights` forbids them."""
    aliases = adapter.hf_aliases().items()
    entries = metadata.state_dict_metadata
    copies = {name: copy for name, copy in aliases if name in entries and copy in names}
    if copies:
        from_rank_zero(lambda: _check_copies(copies, metadata, path))
    untrained = {name for name in names if adapter.holds_untrained_part(name)}
    if useless := sorted({*names} - untrained):
        logger.info(f"Tensors that the model does not use, so not read: {_counted(useless)}")
    if not untrained:
        return
    n_bytes = sum(
        entries[name].size.numel() * entries[name].properties.dtype.itemsize for name in untrained
    )
    counted = f"{_counted(untrained)}, {n_bytes:,} bytes"
    parts = f"{path} has parts that are not trained, so not read: {counted}"
    if untrained_weights == "drop":
        logger.warning(f'{parts}; set checkpoint.untrained_weights = "copy" to export them')
    elif untrained_weights == "refuse":
        raise ValueError(
            f"{parts}; checkpoint.untrained_weights = 'refuse' forbids them: set it to 'copy' to "
            "keep them in exports, or to 'drop' to leave them out"
        )
    elif are_quantized(untrained):
        raise ValueError(
            f"{parts}; they are quantized, and an export is not, so checkpoint.untrained_weights = "
            "'copy' cannot copy them: set it to 'drop', or give a model without quantization"
        )


def _counted(names: Iterable[str]) -> str:
    """Return the names as text; names that differ only in numbers are joined to one name with a count."""
    counts = Counter(to_template(name)[0] for name in sorted(names))
    one = {to_template(name)[0]: name for name in names}
    return shorten([f"{t} ({n} times)" if n > 1 else one[t] for t, n in counts.items()])


def _check_copies(copies: Mapping[str, str], metadata: Any, path: str) -> None:
    """Raise ValueError if a tied weight differs from its copy in the files."""
    file_of = {index.fqn: entry.relative_path for index, entry in metadata.storage_data.items()}
    for name, copy in copies.items():
        with (
            safe_open(regular_file(file_of[name]), framework="pt") as file,
            safe_open(regular_file(file_of[copy]), framework="pt") as other_file,
        ):
            one, other = file.get_slice(name), other_file.get_slice(copy)
            shape, n_rows = one.get_shape(), _ROWS_COMPARED
            if shape != other.get_shape() or not all(
                torch.equal(one[row : row + n_rows].float(), other[row : row + n_rows].float())
                for row in range(0, shape[0], n_rows)
            ):
                raise ValueError(
                    f"{path} cannot be read: its config.json has tie_word_embeddings = true, but "
                    f"{copy} differs from {name}; set tie_word_embeddings = false there to train "
                    f"both, or remove {copy}"
                )


def _parts_of(
    state_dict: dict[str, Any], adapter: BaseStateDictAdapter
) -> Iterator[dict[str, Any]]:
    """Split the entries that have an HF name into parts of bounded size that the adapter can translate.

    Ranks that share tensors get the same parts, because adapters gather some tensors.
    """
    part: dict[str, Any] = {}
    n_bytes = 0
    for names in adapter.groups_of(state_dict):
        if n_bytes >= _BYTES_PER_PART:
            yield part
            part, n_bytes = {}, 0
        for name in names:
            part[name] = tensor = state_dict[name]
            n_ranks = 1  # assume equal shards, so every rank counts the same bytes
            if is_dtensor(tensor):
                for axis, placement in enumerate(tensor.placements):
                    n_ranks *= 1 if placement.is_replicate() else tensor.device_mesh.size(axis)
            itemsize = 4 if tensor.dtype == torch.uint8 else tensor.itemsize
            n_bytes += itemsize * nf4.num_numbers(tensor) // n_ranks
    if part:
        yield part


def save_to_hf(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    folder: str,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    untrained: UntrainedParts | None = None,
) -> None:
    """Write the model to safetensors files with an index, and what `transformers` needs. Collective.

    dtype: dtype of floating-point tensors; None: no cast. untrained: parts of the loaded model to copy.
    Tensors go to the files of the index in `hf_assets_path`, else to files of at most 5 GB.
    """
    adapter = adapter.for_export(untrained.all_names if untrained else ())
    has_name = {name for names in adapter.groups_of(state_dict) for name in names}
    unnamed = {  # skips a bias of zeros, which has no effect
        name
        for name, tensor in state_dict.items()
        if name not in has_name and name.endswith(".expert_bias") and local_tensor(tensor).any()
    }
    if left_out := sorted(set().union(*all_ranks(unnamed))):
        logger.warning(
            f"Hugging Face files cannot hold {shorten(left_out)}, so a model loaded from {folder} gives "
            "other outputs. Set moe_args.load_balance_coeff = None to train without expert_bias"
        )
    if untrained is not None and os.path.realpath(untrained.folder) == os.path.realpath(folder):
        raise ValueError(
            f"{folder} holds the weights that checkpoint.untrained_weights = 'copy' copies, and an export "
            "there would remove them first; export to another folder"
        )
    from_rank_zero(lambda: start_writing(folder))

    hashes = _write_weights(state_dict, adapter, folder, dtype)
    if untrained is not None:
        hashes |= untrained.copy_to(folder)

    def write_the_rest() -> None:
        if (model_args := getattr(adapter, "model_args", None)) is not None:
            kinds = [t.dtype for t in state_dict.values() if t.is_floating_point()]
            most_used = dtype or max(kinds, key=kinds.count)
            assets = adapter.hf_assets_path
            base = untrained and untrained.folder
            write_model_files(folder, model_args, assets, most_used, tokenizer, chat_template, base)
        finish_writing(folder, hashes)

    from_rank_zero(write_the_rest)
    logger.info(f"Wrote {len(hashes)} Hugging Face files to {folder}")


def _file_index(sizes: dict[str, int], known: dict[str, int] | None) -> dict[str, int]:
    """Return HF name -> file number (from 1).

    sizes: HF name -> bytes. known: HF name -> file number of an existing index.
    """
    if known:
        last = max(known.values())  # the file of tensors that the index doesn't list
        return {name: known.get(name, last) for name in sizes}
    index, number, n_bytes = {}, 1, 0
    for name, size in sizes.items():
        if n_bytes and n_bytes + size > _BYTES_PER_FILE:
            number, n_bytes = number + 1, 0
        index[name] = number
        n_bytes += size
    return index


_Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a whole tensor


def _n_bytes(kind: _Kind) -> int:
    return kind[0].itemsize * math.prod(kind[1])


class _WeightFile:
    """A safetensors file; tensors are added in the order of `kinds`, and written and hashed in a thread."""

    def __init__(self, path: str, kinds: dict[str, _Kind]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, kind in kinds.items():
            start, end = end, end + _n_bytes(kind)
            dtype = next(key for key, dtype in DTYPES.items() if dtype == kind[0])
            header[name] = {"dtype": dtype, "shape": kind[1], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._hashed, self._thread = HashedFile(path), ThreadPoolExecutor(1)
        self._file = io.BufferedWriter(self._hashed)
        self._writing = self._thread.submit(
            self._file.write, len(text).to_bytes(8, "little") + text
        )

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor, once the previous one is written. `close` raises the first error."""
        if not self._writing.exception():
            data = bytes_of(tensor.cpu()).numpy()
            self._writing = self._thread.submit(self._file.write, data)

    def close(self) -> str:
        """Return the file's hash. Raises OSError if the file could not be written."""
        with self._thread, self._file:
            self._writing.result()
        return self._hashed.hexdigest()


def _write_weights(
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    folder: str,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Write the weights and their index; return file name -> hash. Collective.

    Every tensor is gathered, and sent to the rank that writes its file. Only ranks on rank 0's machine
    write. All parts are converted twice, because a file begins with the sizes of all its tensors.
    """
    parts = list(_parts_of(state_dict, adapter))

    def in_hf(part: dict[str, Any]) -> dict[str, Any]:
        return adapter.to_hf(part if dtype is None else cast_weights(part, dtype))

    def kinds_here() -> list[dict[str, _Kind]]:
        return [{name: (x.dtype, tuple(x.shape)) for name, x in in_hf(p).items()} for p in parts]

    rank, of_ranks = dist.get_rank() if dist.is_initialized() else 0, on_all_ranks(kinds_here)
    rounds = list(zip_longest(*of_ranks, fillvalue={}))
    part_of: dict[str, int] = {}  # HF name -> index of the first part that holds it
    holders, kinds = defaultdict(list), {}  # HF name -> ranks that hold it; HF name -> kind
    for number, held in enumerate(rounds):
        for holder, part in enumerate(held):
            for name, kind in part.items():
                if part_of.setdefault(name, number) == number:
                    kinds[name] = kind
                    holders[name].append(holder)
    sizes = {name: _n_bytes(kind) for name, kind in kinds.items()}
    file_index = _file_index(sizes, adapter.fqn_to_index_mapping)
    n_files = max(file_index.values())
    n_writers = min(n_files, ranks_of_first_machine())
    # Take turns among distant parts, which are in different files, so that several ranks write at once.
    step = -(-len(rounds) // n_writers)
    order = [number for first in range(step) for number in range(first, len(rounds), step)]
    names_of: dict[int, list[str]] = {number: [] for number in order}
    for name, number in part_of.items():
        names_of[number].append(name)
    in_file: dict[int, dict[str, _Kind]] = defaultdict(dict)
    for name in (name for number in order for name in names_of[number]):
        in_file[file_index[name]][name] = kinds[name]

    def open_files() -> None:
        for i in in_file:
            if i % n_writers == rank:
                files[i] = _WeightFile(os.path.join(folder, _file_name(i, n_files)), in_file[i])

    files: dict[int, _WeightFile] = {}
    on_all_ranks(open_files)
    device = next(map(_device_of, state_dict.values()), "cpu")
    for number in order:
        part = in_hf(parts[number]) if number < len(parts) else {}
        for name in names_of[number]:
            writer, data = file_index[name] % n_writers, None
            if name in part:
                data = part.pop(name).detach()
                data = whole_tensor(data.to(_device_of(data))).contiguous()
            if writer not in holders[name]:
                if rank == holders[name][0]:
                    dist.send(bytes_of(data), writer)
                elif rank == writer:
                    data = torch.empty(sizes[name], dtype=torch.uint8, device=device)
                    dist.recv(data, holders[name][0])
            if rank == writer:
                files[file_index[name]].add(data)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a long device queue might time out a collective
    closed = on_all_ranks(lambda: {_file_name(i, n_files): f.close() for i, f in files.items()})
    hashes = {name: digest for part in closed for name, digest in part.items()}
    weight_map = {name: _file_name(number, n_files) for name, number in file_index.items()}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    index_path = Path(folder, HF_INDEX)
    return hashes | {HF_INDEX: from_rank_zero(lambda: write_json(index_path, index))}


def _device_of(tensor: torch.Tensor) -> str:
    """Return the device type on which the tensor is sent and received."""
    return tensor.device_mesh.device_type if is_dtensor(tensor) else tensor.device.type


def _file_name(number: int, n_files: int) -> str:
    return f"model-{number:05}-of-{n_files:05}.safetensors"
