"""torch's distributed checkpoint (DCP), with three changes.

`load` executes nothing from the files: torch's own reads `.metadata` and every entry that is no
tensor with pickle, which calls any function that the file names. `SavePlans` remembers which rank
writes what. `one_error` makes one sentence of what went wrong.
"""

import dataclasses
import functools
import io
import itertools
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    async_save,
    save,
)
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _ReaderView
from torch.futures import Future

from torchtitan.checkpoint.folder import DCP_METADATA, path_inside
from torchtitan.distributed.processes.ranks import on_all_ranks
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file
from torchtitan.tools.unpickling import Names, read_pickle, refusal

__all__ = ["SafeReader", "SavePlans", "async_save", "load", "one_error", "save"]


@contextmanager
def one_error(what: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Make one sentence, a RunError, of the file system's errors and of DCP's exception, a
    BaseException that quotes every rank's stack. It ends with `advice()`."""
    try:
        yield
    except CheckpointException as error:
        reasons = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        told = f"{what} (on rank {ranks}): {'; '.join(sorted(reasons))}"
        raise RunError(told + advice()) from error
    except OSError as error:
        raise RunError(f"{what}: {type(error).__name__}: {error}{advice()}") from error


# Loading


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | None = None,
    storage_reader: StorageReader | None = None,
) -> None:
    """Read a checkpoint into `state_dict`, as torch's `load` does. Collective.

    checkpoint_id: the folder. storage_reader: takes its place for files that are not DCP's.
    Raises ValueError, on every rank, if `.metadata` cannot be used, and CheckpointException with a
    ValueError that names the file of each rank that failed to read its part.
    """
    planner = None
    if storage_reader is None:
        storage_reader, planner = SafeReader(checkpoint_id), _SafePlanner()
        # Here, since torch's own attempt logs a stack and then looks for another file.
        on_all_ranks(storage_reader.check_metadata)
    torch_dcp.load(state_dict, storage_reader=storage_reader, planner=planner)


def check_same_kinds(tensors: dict[str, Any], metadata: Metadata | None) -> None:
    """Raise ValueError if one is floating-point, complex or of whole numbers here, and another of
    the three where it is saved: copied, it would mean something else."""
    assert metadata is not None
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            saved, own = entry.properties.dtype, tensor.dtype
            is_same_kind = saved.is_floating_point == own.is_floating_point
            if not is_same_kind or saved.is_complex != own.is_complex:
                raise ValueError(f"{name} is saved as {saved}, and is {own} here")


_LAYOUTS = torch_metadata._MEM_FORMAT_ENCODING
_METADATA_CLASSES = (
    torch_metadata.BytesStorageMetadata,
    torch_metadata.ChunkStorageMetadata,
    torch_metadata.Metadata,
    torch_metadata.MetadataIndex,
    torch_metadata.StorageMeta,
    torch_metadata.TensorProperties,
    torch_metadata.TensorStorageMetadata,
    _LAYOUTS,
    _StorageInfo,
)
# What `.metadata` may name.
METADATA_NAMES: Names = (
    {(cls.__module__, cls.__name__): cls for cls in _METADATA_CLASSES}
    | {
        # The folder it was written to, which is not read.
        (module, name): lambda *parts: "/".join(map(str, parts))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    }
    | {
        ("builtins", "getattr"): lambda _, name: _LAYOUTS[name],  # Python 3.11.0 to 3.11.3
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    }
)


# Of an entry that is no tensor. A number has 1 kB, a data position some MB.
_MOST_BYTES_OF_NUMBER, _MOST_BYTES = 2**16, 2**30


class _EntryView(_ReaderView):
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            # torch's own subtracts the offset; zipfile gives a negative one.
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


class SafeReader(FileSystemReader):
    """DCP's file reader. Raises ValueError, naming the file, for what is damaged or hostile."""

    _metadata: Metadata | None = None

    def check_metadata(self) -> None:
        """ValueError if `.metadata` is missing, or is not one."""
        try:
            self.read_metadata()
        except OSError as error:
            raise ValueError(str(error)) from error

    def read_metadata(self) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        path = os.path.join(self.path, DCP_METADATA)
        with open_file(path_inside(str(self.path), DCP_METADATA), "rb") as file:
            metadata = read_pickle(file, METADATA_NAMES, path)
        try:
            _check_metadata(metadata)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{path} does not describe a DCP checkpoint: {error}") from error
        check_chunks(metadata, path)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """The bytes of one entry; torch calls this for each.

        Raises ValueError for an entry that takes more memory than it has bytes: a zip archive can be
        compressed, and a pickle can make a bytearray of a given length.
        """
        entry = _EntryView(file, sinfo.offset, sinfo.length)
        if entry.read(4) == b"PK\3\4":  # else a pickle of before torch 1.6, and not compressed
            with zipfile.ZipFile(entry) as archive:
                parts = archive.infolist()
                if (n_bytes := sum(part.file_size for part in parts)) > sinfo.length:
                    raise ValueError(f"an entry of {sinfo.length} bytes unpacks to {n_bytes}")
                pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
                if any(b"\nbytearray\n" in archive.read(part) for part in pickles):
                    raise ValueError(refusal("bytearray"))
        entry.seek(0)
        return entry

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items_of_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            items_of_file.setdefault(info.relative_path, []).append(item)
        for name, items in items_of_file.items():
            path = path_inside(str(self.path), name)
            try:
                size = os.path.getsize(path)
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            infos = [self.storage_data[item.storage_index] for item in items]
            if (end := max(info.offset + info.length for info in infos)) > size:
                raise ValueError(
                    f"{path} is cut off: it has {size} bytes, and {DCP_METADATA} speaks of {end}"
                )
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except Exception as error:  # torch tells a damaged entry in many ways
                raise ValueError(f"{path} cannot be read: {_in_short(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _SafePlanner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        check_same_kinds(self.state_dict, self.metadata)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        before = self.state_dict[name]
        most = _MOST_BYTES_OF_NUMBER if isinstance(before, int | float) else _MOST_BYTES
        if (n_bytes := value.getbuffer().nbytes) > most:
            raise ValueError(f"the entry {name} has {n_bytes} bytes, and at most {most} are read")
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"the entry {name}: {_in_short(error)}") from error
        # Numbers stand for each other, and so do lists and tuples.
        kinds = [
            float if isinstance(v, int) else list if isinstance(v, tuple) else type(v)
            for v in (before, content)
        ]
        # A tensor, a learning rate say, may have been a number.
        is_open = before is None or content is None or isinstance(before, torch.Tensor)
        if not is_open and kinds[0] is not kinds[1]:
            raise ValueError(
                f"the entry {name} is of type {type(content).__name__}, and "
                f"{type(before).__name__} was expected"
            )
        set_element(self.original_state_dict, self.mappings[name], content)


def _in_short(error: Exception) -> str:
    """The reason, without torch's pages about how to trust a file."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        name = re.search(r"GLOBAL ([\w.]+)", text)
        return refusal(name[1]) if name else "it is damaged"
    return re.split(r"\n|\. This is an internal", text)[0] or "it is damaged"


def _check_metadata(metadata: Any) -> None:
    """Raises TypeError or AttributeError if a part is not what its field says."""

    def check(value: Any, *types: type) -> None:
        if not isinstance(value, types):
            wanted = " or ".join(cls.__name__ for cls in types)
            raise TypeError(f"a {wanted} was expected, got a {type(value).__name__}")

    check(metadata, Metadata)
    check(metadata.state_dict_metadata, dict)
    for name, entry in metadata.state_dict_metadata.items():
        check(name, str)
        check(entry, TensorStorageMetadata, torch_metadata.BytesStorageMetadata)
        if isinstance(entry, TensorStorageMetadata):
            check(entry.size, torch.Size)
            check(entry.chunks, list)
            for chunk in entry.chunks:
                check(chunk, torch_metadata.ChunkStorageMetadata)
                check(chunk.offsets, torch.Size)
                check(chunk.sizes, torch.Size)
    check(metadata.storage_data, dict)
    for index, info in metadata.storage_data.items():
        check(index, torch_metadata.MetadataIndex)
        check(info, _StorageInfo)
        check(info.relative_path, str)
        for number in (info.offset, info.length):
            check(number, int)
            if number < 0:
                raise TypeError(f"{index.fqn} lies at a negative offset")
        if info.transform_descriptors:
            raise TypeError(f"{index.fqn} is compressed, which is not read here")


def check_chunks(metadata: Metadata, path: str) -> None:
    """Raise ValueError unless the chunks of each tensor cover it, and every number once.

    torch reads what the chunks cover, and leaves the rest of a tensor as it was.
    """
    for name, entry in metadata.state_dict_metadata.items():
        starts: list[torch.Size | None] = [None]
        if isinstance(entry, TensorStorageMetadata):
            boxes = tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
            if not _are_tiles(tuple(entry.size), boxes):
                raise ValueError(
                    f"{path} is damaged: its {len(boxes)} chunks of {name} do not cover every number "
                    f"of the {list(entry.size)} once; load another checkpoint"
                )
            starts = [chunk.offsets for chunk in entry.chunks]
        for start in starts:
            if torch_metadata.MetadataIndex(name, start) not in metadata.storage_data:
                raise ValueError(
                    f"{path} is damaged: it does not say where a chunk of {name} lies; load another "
                    "checkpoint"
                )


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@functools.lru_cache(256)  # layers are alike, and an optimizer's moments are as the weights
def _are_tiles(size: tuple[int, ...], boxes: tuple[_Box, ...]) -> bool:
    """Whether the boxes lie in a tensor of this size, cover it, and don't overlap.

    The tensor is cut in two, with the boxes that the cut meets, until each part is one box.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size):
            return False
        axes = zip(offsets, sizes, size, strict=True)
        if any(not 0 <= offset <= offset + n <= most for offset, n, most in axes):
            return False
    parts = [(((0,) * len(size), size), [box for box in boxes if math.prod(box[1])])]
    while parts:
        (start, lengths), inside = parts.pop()
        if sum(math.prod(sizes) for _, sizes in inside) != math.prod(lengths):
            return False
        if len(inside) < 2:
            continue
        # Where the boxes begin, but for the first, along the axis that has most such places.
        cuts = [sorted({box[0][axis] for box in inside})[1:] for axis in range(len(size))]
        axis = max(range(len(size)), key=lambda a: len(cuts[a]))
        if not cuts[axis]:  # all begin at one place
            return False
        cut = cuts[axis][len(cuts[axis]) // 2]
        for low, high in ((start[axis], cut), (cut, start[axis] + lengths[axis])):
            parts.append((_clipped((start, lengths), axis, low, high), []))
            for box in inside:
                clipped = _clipped(box, axis, low, high)
                if clipped[1][axis] > 0:
                    parts[-1][1].append(clipped)
    return True


def _clipped(box: _Box, axis: int, low: int, high: int) -> _Box:
    """The part of the box between two places on an axis; its size is at most 0 if it has none."""
    offsets, sizes = map(list, box)
    begin, end = max(offsets[axis], low), min(offsets[axis] + sizes[axis], high)
    offsets[axis], sizes[axis] = begin, end - begin
    return tuple(offsets), tuple(sizes)


# Saving

# Where DCP remembers plans: dicts of the class, by a key.
_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)
_numbers = itertools.count()


class SavePlans:
    """Which rank writes what, remembered from one save of a manager to the next.

    For each save every rank lists its tensors, rank 0 merges the lists of all ranks, and each gets
    back what it has to write. That work grows with the model times the ranks, and comes out the
    same every time. DCP can remember it: a rank whose list is as before says only that.
    """

    def __init__(self) -> None:
        self._key = ""
        self.forget()

    def arguments(self) -> dict[str, Any]:
        """What `save` gets for the next save. A single rank has nothing to agree on."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {}
        return {"planner": _RememberingPlanner(self._key)}

    def forget(self) -> None:
        for name in _CACHES:
            getattr(SavePlanner, name, {}).pop(self._key, None)
        # DCP's own key is the same for all managers of this process.
        self._key = f"torchtitan {next(_numbers)}"


class _RememberingPlanner(DefaultSavePlanner):
    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # DCP compares names and shapes, but not dtypes, which .metadata has too.
        if not plan.usable and self.plan != SavePlanner._cached_save_plan[self._cached_plans_key]:
            plan = self._pending_local_plan = self.plan
        return plan
