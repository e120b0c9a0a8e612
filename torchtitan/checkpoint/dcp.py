"""torch's distributed checkpoint (DCP). `one_error` turns its failures into one sentence.

`load` executes no code from the files. torch's own `load` unpickles `.metadata` and every non-tensor
entry, and pickle calls any function that the file names.
"""

import dataclasses
import functools
import io
import math
import operator
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import CheckpointException, async_save, save
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from torchtitan.checkpoint.folder import DCP_METADATA, in_two_threads, is_plain, path_inside
from torchtitan.checkpoint.stream import bytes_of
from torchtitan.distributed.processes.ranks import on_all_ranks
from torchtitan.tools import storage, torch_parts
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file
from torchtitan.tools.unpickling import Names, read_pickle, refusal

__all__ = ["SafeReader", "async_save", "load", "one_error", "save"]


@contextmanager
def one_error(what: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Turn OSError and DCP's CheckpointException into a RunError: `what`, the reason, `advice()`.

    CheckpointException is a BaseException that quotes every rank's stack.
    """
    try:
        yield
    except CheckpointException as error:
        reasons = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        message = f"{what} (on rank {ranks}): {'; '.join(sorted(reasons))}"
        raise RunError(message + advice()) from error
    except OSError as error:
        raise RunError(f"{what}: {type(error).__name__}: {error}{advice()}") from error


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | None = None,
    storage_reader: torch_dcp.StorageReader | None = None,
) -> None:
    """Read a checkpoint into `state_dict`, as torch's `load` does. Collective.

    checkpoint_id: the folder of a DCP checkpoint. storage_reader: reads another format instead.
    Raises ValueError on every rank if `.metadata` cannot be used. Raises CheckpointException if ranks
    fail to read their parts; for each such rank it holds a ValueError that names the file.
    """
    planner = None
    if storage_reader is None:
        storage_reader, planner = SafeReader(checkpoint_id), _SafePlanner()
        # Read `.metadata` first: if torch's own read fails, it logs a stack and tries another file.
        on_all_ranks(lambda: storage_reader.read_metadata() and None)
    torch_dcp.load(state_dict, storage_reader=storage_reader, planner=planner)


def check_same_kinds(tensors: dict[str, Any], metadata: Metadata | None) -> None:
    """Raise ValueError if a saved dtype differs from the tensor's in kind: real, complex or integer."""
    assert metadata is not None
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            saved, own = entry.properties.dtype, tensor.dtype
            is_same_kind = saved.is_floating_point == own.is_floating_point
            if not is_same_kind or saved.is_complex != own.is_complex:
                raise ValueError(f"{name} is saved as {saved}, but the model has {own}")


_LAYOUTS, _StorageInfo = torch_parts.MemoryFormats, torch_parts.StorageInfo
_Bytes, _Chunk = torch_metadata.BytesStorageMetadata, torch_metadata.ChunkStorageMetadata
_Index, _StorageMeta = torch_metadata.MetadataIndex, torch_metadata.StorageMeta
_METADATA_CLASSES = (Metadata, TensorStorageMetadata, _Bytes, _Chunk, _Index, _StorageMeta)


class _TensorProperties(torch_metadata.TensorProperties):
    """Reads properties saved by a newer torch: 2.15 appends strides, which loading doesn't need."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(dataclasses.fields(self))])
        self.__class__ = torch_metadata.TensorProperties  # `==` requires equal classes


# The classes and functions that the pickle `.metadata` may name.
METADATA_NAMES: Names = (
    {(c.__module__, c.__name__): c for c in (*_METADATA_CLASSES, _LAYOUTS, _StorageInfo)}
    | {(torch_metadata.__name__, "TensorProperties"): _TensorProperties}
    | {
        # DCP stores the folder's path at the time of the save. Loading ignores the path.
        (module, name): lambda *parts: "/".join(map(str, parts))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    }
    | {
        # Python 3.11.0 to 3.11.3 pickle an enum member as a call of getattr.
        ("builtins", "getattr"): lambda _, name: _LAYOUTS[name],
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): {
            str(x): x for x in vars(torch).values() if isinstance(x, torch.layout)
        }.get,
    }
)


class _EntryView(torch_parts.FileView):
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            # torch's version subtracts the offset, but zipfile passes a negative offset.
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


class SafeReader(torch_dcp.FileSystemReader):
    """DCP's file reader. Raises ValueError, naming the file, if a file is damaged or hostile.

    path: a folder or an address.
    """

    _metadata: Metadata | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.path = os.fspath(path)  # as a Path, an address would lose a slash

    def read_metadata(self) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        path = storage.join(self.path, DCP_METADATA)
        try:
            with open_file(path_inside(self.path, DCP_METADATA), "rb") as file:
                metadata = read_pickle(file, METADATA_NAMES, path)
            check_chunks(metadata, path)
            for index, info in metadata.storage_data.items():
                if info.offset < 0 or info.length < 0 or info.transform_descriptors:
                    raise TypeError(
                        f"{index.fqn} is compressed, or has a negative offset or length"
                    )
        except OSError as error:
            raise ValueError(str(error)) from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{path} does not describe a DCP checkpoint: {error}") from error
        metadata.storage_meta = _StorageMeta(load_id=self.load_id)
        self._metadata = metadata
        return metadata

    def read_data(self, plan: torch_dcp.LoadPlan, planner: torch_dcp.LoadPlanner) -> Future[None]:
        items_of_file: dict[str, list[torch_dcp.ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            items_of_file.setdefault(name, []).append(item)

        def read(name: str) -> None:
            path = path_inside(self.path, name)
            try:
                ranged = storage.is_address(path)
                with storage.RangedFile(path) if ranged else open_file(path, "rb") as file:
                    for item in items_of_file[name]:
                        self._read_item(file, item, planner)
            except Exception as error:  # a damaged entry raises many kinds of errors
                raise ValueError(f"{path} cannot be read: {_reason_of(error)}") from error

        in_two_threads(read, list(items_of_file))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: Any, item: torch_dcp.ReadItem, planner: Any) -> None:
        info = self.storage_data[item.storage_index]
        if info.transform_descriptors:
            raise ValueError(
                "an entry is compressed by a stream extension; save it without extensions"
            )
        entry: Any = _EntryView(file, info.offset, info.length)
        if isinstance(file, storage.RangedFile):  # read the whole entry in one request
            entry = io.BytesIO(file[info.offset : info.offset + info.length])
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(entry.read()))
            return
        target = planner.resolve_tensor(item).detach()
        numbers = _numbers_in(entry, info.length, None if any(item.storage_offsets) else target)
        if numbers is not None:
            entry.seek(numbers)
            if entry.readinto(bytes_of(target).numpy()) != target.nbytes:
                raise ValueError("it is cut off")
        else:
            entry.seek(0)
            whole = torch.load(entry, map_location="cpu", weights_only=True)
            ends = map(operator.add, item.storage_offsets, item.lengths)
            part = whole[tuple(map(slice, item.storage_offsets, ends))]
            if part.shape != target.shape:
                raise ValueError(
                    f"a tensor has the shape {list(part.shape)}, expected {list(target.shape)}"
                )
            target.copy_(part)
        planner.commit_tensor(item, target)


def _numbers_in(entry: IO[bytes], n_bytes: int, target: torch.Tensor | None) -> int | None:
    """Return the byte offset of an entry's tensor data if it can be read directly into `target`, else None.

    target: None only checks the entry's size. Raises ValueError if the entry would take more memory than
    its `n_bytes`: a zip archive can be compressed, and a pickle can make a bytearray of any length.
    """
    if entry.read(4) != b"PK\3\4":  # torch before 1.6 saved plain pickles, never compressed
        return None

    def start_of(record: zipfile.ZipInfo) -> int:
        entry.seek(record.header_offset)
        name, extra = struct.unpack("<26x2H", entry.read(30))
        return record.header_offset + 30 + name + extra

    records = zipfile.ZipFile(entry).infolist()
    unpacked = sum(record.file_size for record in records)
    if unpacked > n_bytes:
        raise ValueError(f"an entry of {n_bytes} bytes unpacks to {unpacked}")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("an entry is compressed")
    pickles = []
    for record in records:
        if record.filename.endswith("/data.pkl"):
            entry.seek(start_of(record))
            pickles.append(entry.read(record.file_size))
    if any(b"\nbytearray\n" in pickled for pickled in pickles):
        raise ValueError(refusal("bytearray"))
    folder = records[0].filename.partition("/")[0]  # like torch, use the first record's folder
    found = {record.filename.removeprefix(f"{folder}/"): record for record in records}
    numbers, byte_order = found.get("data/0"), found.get("byteorder")
    if type(target) is not torch.Tensor or not target.is_cpu or not numbers or len(pickles) != 1:
        return None
    # The record holds "little" or "big", so its size shows which.
    if byte_order is not None and byte_order.file_size != len(sys.byteorder):
        return None
    layout = target.dtype, target.shape, target.stride()
    is_same = numbers.file_size == target.nbytes and _layout_in(pickles[0]) == layout
    return start_of(numbers) if is_same else None


_STORAGES = (
    "Float=float32 Double=float64 Half=float16 BFloat16=bfloat16 Long=int64 Int=int32 Short=int16 Char=int8 "
    "Byte=uint8 Bool=bool"
)
# The classes and functions that a tensor's pickle may name.
_TENSOR_NAMES: Names = {
    ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: parts,
    ("collections", "OrderedDict"): OrderedDict,
} | {
    ("torch", f"{kind}Storage"): getattr(torch, dtype)
    for kind, dtype in (pair.split("=") for pair in _STORAGES.split())
}


@functools.lru_cache(256)  # layers, and their optimizer moments, have equal pickles
def _layout_in(pickled: bytes) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None:
    """Return (dtype, shape, stride) of a pickled tensor that is stored contiguously; None for others."""
    try:
        reference, offset, size, stride, _, hooks = read_pickle(
            io.BytesIO(pickled), _TENSOR_NAMES, ""
        )
        _, dtype, key, _, n_numbers = reference
        is_plain = (offset, key, hooks, n_numbers) == (0, "0", {}, math.prod(size))
        is_plain &= torch.empty(size, device="meta").stride() == stride
    except (TypeError, ValueError, RuntimeError):
        return None
    return (dtype, size, stride) if is_plain else None


class _SafePlanner(torch_dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[bytes, Any] = {}  # pickled entry -> value

    def create_local_plan(self) -> torch_dcp.LoadPlan:
        check_same_kinds(self.state_dict, self.metadata)
        return super().create_local_plan()

    def load_bytes(self, read_item: torch_dcp.ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        before = self.state_dict[name]
        try:
            if (data := value.getvalue()) in self._plain:
                content = self._plain[data]
            else:
                _numbers_in(io.BytesIO(data), len(data), None)
                if is_plain(content := torch.load(value, weights_only=True)):
                    self._plain[data] = content
        except pickle.UnpicklingError as error:
            raise ValueError(f"the entry {name}: {_reason_of(error)}") from error
        # int and float may replace each other, and so may list and tuple. A tensor, such as a
        # learning rate, may have been saved as a plain number.
        kinds = [
            float if isinstance(v, int) else list if isinstance(v, tuple) else type(v)
            for v in (before, content)
        ]
        accepts_any = before is None or content is None or isinstance(before, torch.Tensor)
        if not accepts_any and kinds[0] is not kinds[1]:
            raise ValueError(
                f"the entry {name} is of type {type(content).__name__}, but "
                f"{type(before).__name__} was expected"
            )
        *parents, key = self.mappings[name]
        functools.reduce(operator.getitem, parents, self.original_state_dict)[key] = content


def _reason_of(error: Exception) -> str:
    """Return the error's reason in one line, without torch's long advice about trusted files."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        name = re.search(r"GLOBAL ([\w.]+)", text)
        return refusal(name[1]) if name else "it is damaged"
    return re.split(r"\n|\. This is an internal", text)[0] or "it is damaged"


def check_chunks(metadata: Metadata, path: str) -> None:
    """Raise ValueError unless the chunks of each tensor cover every element exactly once.

    torch would silently leave the elements outside all chunks unchanged.
    """
    for name, entry in metadata.state_dict_metadata.items():
        starts: list[torch.Size | None] = [None]
        problem = ""
        if isinstance(entry, TensorStorageMetadata):
            boxes = tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
            if not _are_tiles(tuple(entry.size), boxes):
                problem = (
                    f"its {len(boxes)} chunks of {name} do not cover every element of "
                    f"its shape {list(entry.size)} exactly once"
                )
            starts = [chunk.offsets for chunk in entry.chunks]
        if any(_Index(name, start) not in metadata.storage_data for start in starts):
            problem = problem or f"it has no file position for a chunk of {name}"
        if problem:
            raise ValueError(f"{path} is damaged: {problem}; load another checkpoint")


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) of a chunk
_MAX_CELLS = 2**20  # a tensor sharded over a mesh has one grid cell per chunk


@functools.lru_cache(256)  # layers, and their optimizer moments, share the same boxes
def _are_tiles(size: tuple[int, ...], boxes: tuple[_Box, ...]) -> bool:
    """True if the boxes lie inside a tensor of this size and cover each element exactly once."""
    lines = [{0, n} for n in size]  # the edges of all boxes, which cut the tensor into cells
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size):
            return False
        for axis, (offset, n) in enumerate(zip(offsets, sizes, strict=True)):
            if not 0 <= offset <= offset + n <= size[axis]:
                return False
            lines[axis] |= {offset, offset + n}
    shape = [len(edges) - 1 for edges in lines]
    if math.prod(shape) > _MAX_CELLS:
        return False
    cell_of = [{edge: i for i, edge in enumerate(sorted(edges))} for edges in lines]
    counts = torch.zeros(shape, dtype=torch.int32)
    for offsets, sizes in boxes:
        box = zip(cell_of, offsets, sizes, strict=True)
        counts[tuple(slice(cell[start], cell[start + n]) for cell, start, n in box)] += 1
    return bool((counts == 1).all())
