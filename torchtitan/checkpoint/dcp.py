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
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import CheckpointException, async_save, save
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.futures import Future

from torchtitan.checkpoint.folder import DCP_METADATA, in_two_threads, is_plain, path_inside
from torchtitan.distributed.processes.ranks import on_all_ranks
from torchtitan.tools import storage, torch_parts
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file
from torchtitan.tools.unpickling import Names, read_pickle, refusal

__all__ = ["SafeReader", "async_save", "load", "one_error", "save"]

_BYTES_OF_A_NUMBER = 2**11  # a saved number or pair of numbers takes less


@contextmanager
def one_error(what: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Raise OSErrors and DCP's CheckpointException as a RunError: `what`, the reason, `advice()`.

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
    fail to read their parts; it holds one ValueError, which names the file, for each such rank.
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
        self.__class__ = torch_metadata.TensorProperties  # torch compares the class


# The classes and functions that the pickle `.metadata` may name.
METADATA_NAMES: Names = (
    {(c.__module__, c.__name__): c for c in (*_METADATA_CLASSES, _LAYOUTS, _StorageInfo)}
    | {(torch_metadata.__name__, "TensorProperties"): _TensorProperties}
    | {
        # The path of the folder at the time of the save. Loading ignores the path.
        (module, name): lambda *parts: "/".join(map(str, parts))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    }
    | {
        ("builtins", "getattr"): lambda _, name: _LAYOUTS[name],  # enums of Python 3.11.0 to 3.11.3
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


class _Address(FileSystem):
    """Lets DCP's file reader read a checkpoint at an address (torch's own leaves errors untranslated)."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield storage.RangedFile(path)

    def concat_path(self, path: Any, suffix: str) -> str:
        return path_inside(path, suffix)

    def init_path(self, path: Any) -> str:
        return os.fspath(path)


class SafeReader(torch_dcp.FileSystemReader):
    """DCP's file reader. Raises ValueError, naming the file, if a file is damaged or hostile.

    path: a folder or an address.
    """

    _metadata: Metadata | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._harmless: set[bytes] = set()  # small entries that `_slice_file` has accepted
        if storage.is_address(path):
            self.fs = _Address()
            self.path = self.fs.init_path(path)

    def read_metadata(self) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        path = storage.join(str(self.path), DCP_METADATA)
        try:
            with open_file(path_inside(str(self.path), DCP_METADATA), "rb") as file:
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

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Return one entry's bytes; torch calls this for each entry (`torch_parts.read_entry`). Raises
        ValueError if the entry would take more memory than it has bytes.

        A zip archive can be compressed, and a pickle can make a bytearray of any length.
        """
        entry: Any = _EntryView(file, sinfo.offset, sinfo.length)
        if isinstance(file, storage.RangedFile):  # one request for the whole entry
            entry = io.BytesIO(file[sinfo.offset : sinfo.offset + sinfo.length])
        if sinfo.length < _BYTES_OF_A_NUMBER:
            entry = io.BytesIO(data := entry.read())
            if data in self._harmless:
                return entry
        if entry.read(4) == b"PK\3\4":  # otherwise a pickle from before torch 1.6, never compressed
            with zipfile.ZipFile(entry) as archive:
                parts = archive.infolist()
                if (n_bytes := sum(part.file_size for part in parts)) > sinfo.length:
                    raise ValueError(f"an entry of {sinfo.length} bytes unpacks to {n_bytes}")
                pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
                if any(b"\nbytearray\n" in archive.read(part) for part in pickles):
                    raise ValueError(refusal("bytearray"))
        if sinfo.length < _BYTES_OF_A_NUMBER:
            self._harmless.add(data)
        entry.seek(0)
        return entry

    def read_data(self, plan: torch_dcp.LoadPlan, planner: torch_dcp.LoadPlanner) -> Future[None]:
        """Read file by file, to name the file in an error."""
        items_of_file: dict[str, list[torch_dcp.ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            items_of_file.setdefault(name, []).append(item)

        def read(name: str) -> None:
            path, part = path_inside(str(self.path), name), items_of_file[name]
            try:
                super(SafeReader, self).read_data(dataclasses.replace(plan, items=part), planner)
            except Exception as error:  # torch raises many kinds of errors for a damaged entry
                raise ValueError(f"{path} cannot be read: {_reason_of(error)}") from error

        in_two_threads(read, list(items_of_file))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _SafePlanner(torch_dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[bytes, Any] = {}  # entries and their values

    def create_local_plan(self) -> torch_dcp.LoadPlan:
        check_same_kinds(self.state_dict, self.metadata)
        return super().create_local_plan()

    def load_bytes(self, read_item: torch_dcp.ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        before = self.state_dict[name]
        try:
            if (data := value.getvalue()) in self._plain:
                content = self._plain[data]
            elif is_plain(content := torch.load(value, weights_only=True)):
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
                    f"its {len(boxes)} chunks of {name} do not cover every number of the "
                    f"{list(entry.size)} once"
                )
            starts = [chunk.offsets for chunk in entry.chunks]
        if any(_Index(name, start) not in metadata.storage_data for start in starts):
            problem = problem or f"it has no file position for a chunk of {name}"
        if problem:
            raise ValueError(f"{path} is damaged: {problem}; load another checkpoint")


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
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
