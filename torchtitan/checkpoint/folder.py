"""A step folder on disk: whether the folder is complete, and the hashes of its files.

A folder whose writer was killed at any point is recognised as unfinished, because of this order:

1. rank 0 creates the marker `.incomplete`, then, if a caller named the folder, `.keep`,
2. every rank writes its files, hashing what it writes,
3. when every rank has finished, rank 0 writes `.metadata`, then `.xxh128sums` (for `xxh128sum -c`),
4. rank 0 removes `.incomplete`; `.keep` stays.

Removal also creates `.incomplete` first and deletes it last. Folders of other tools have neither
marker nor hashes: they count as complete if they hold `.metadata` or safetensors files, unverified.

The hashes find damage, not forgery: XXH3-128 takes an eighth of the time of SHA-256, which earlier
releases wrote to `.sha256sums`. Both are verified.

`upload_folder` copies a finished folder to an address (see `tools.storage`) in the same order: it
writes the hash file last, and an uploaded step counts as complete only with this file.
"""

import io
import json
import math
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero, on_all_ranks
from torchtitan.tools import storage, torch_parts
from torchtitan.tools.files import UNFINISHED, hash_file, open_descriptor, open_file
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import run_beside

T, U = TypeVar("T"), TypeVar("U")

UNFINISHED_MARKER = ".incomplete"
KEPT_MARKER = ".keep"
HASHES_FILE = ".xxh128sums"
HASHES_FILES = (HASHES_FILE, ".sha256sums")
DCP_METADATA = ".metadata"
RUN_RECORD = "run.json"
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE_FILE = "model.safetensors"
WEIGHT_FILES = (
    DCP_METADATA,
    f"{DCP_METADATA}.tmp",  # DCP writes this file, then renames it
    *HASHES_FILES,
    RUN_RECORD,
    HF_INDEX,
    "*.distcp",
    "*.safetensors",
)
GIB = 1024**3
_ALGORITHMS = {32: xxhash.xxh3_128, 64: "sha256"}  # length of a hash in hex digits -> algorithm
_BYTES_FOR_TWO_FILES = 2**25  # write two files only if each has at least this size
_BUFFER = 2**20


class Contents(Enum):
    UNFINISHED = "unfinished"
    DCP = "dcp"
    HF = "hf"
    DAMAGED = "damaged"  # has files of a checkpoint, but no `.metadata`
    UNKNOWN = "unknown"


class StepFolder(NamedTuple):
    """The folder of a step. is_base: the step is the base model of LoRA adapters; see `mark_base`."""

    step: int
    path: str
    contents: Contents
    is_base: bool

    @property
    def is_finished(self) -> bool:
        return self.contents in (Contents.DCP, Contents.HF)


def contents_of(folder: str, names: Collection[str] | None = None) -> Contents:
    """Return the kind of checkpoint in `folder`. names: the file names in it; None lists the folder."""
    for name, contents in (
        (UNFINISHED_MARKER, Contents.UNFINISHED),
        (DCP_METADATA, Contents.DCP),
        (HF_INDEX, Contents.HF),
        (HF_SINGLE_FILE, Contents.HF),
    ):
        path = storage.join(folder, name)
        if name in names if names is not None else storage.is_file(path):
            return contents
    names = storage.names_in(folder) if names is None else names
    is_damaged = any(name in HASHES_FILES or name.endswith(".distcp") for name in names)
    return Contents.DAMAGED if is_damaged else Contents.UNKNOWN


def path_inside(folder: str, name: str) -> str:
    """Return the path of file `name` in `folder`, links resolved; ValueError if it leads elsewhere."""
    if storage.is_address(folder):
        if ".." in name.split("/"):
            raise ValueError(f"{name} leads out of {folder}; put the file itself there")
        return storage.join(folder, name)
    root, path = Path(folder).resolve(), Path(folder, name).resolve()
    # Links of Hugging Face's cache, from snapshots/<revision> to the repository's blobs, are allowed.
    blobs = [p.parent / "blobs" for p in (root, *root.parents) if p.name == "snapshots"]
    if not any(path.is_relative_to(place) for place in (root, *blobs)):
        raise ValueError(
            f"{name} in {folder} leads out of the folder, to {path}; put the file itself there"
        )
    return str(path)


def list_steps(folder: str) -> list[StepFolder]:
    """Return the `step-<N>` folders in `folder`, sorted by N. Other names are ignored."""
    found = []
    if storage.is_address(folder):
        files: dict[str, dict[str, int]] = defaultdict(dict)  # step folder -> file -> bytes
        for path, about in storage.find(folder).items():
            files[path.partition("/")[0]][path.partition("/")[2]] = about.st_size
        for name, sizes in files.items():
            if match := re.fullmatch(r"step-(\d+)", name):
                path = storage.join(folder, name)
                is_uploaded = not sizes.keys().isdisjoint(HASHES_FILES)
                contents = contents_of(path, sizes) if is_uploaded else Contents.UNFINISHED
                step, is_base = int(match.group(1)), sizes.get(KEPT_MARKER, 0) > 0
                found.append(StepFolder(step, path, contents, is_base))
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        match = re.fullmatch(r"step-(\d+)", entry.name)
        if match and entry.is_dir():
            with suppress(FileNotFoundError):  # another rank may have just removed the folder
                # A process may have been killed after creating the folder, before writing the marker.
                is_empty = not os.listdir(entry.path)
                contents = Contents.UNFINISHED if is_empty else contents_of(entry.path)
                kept = os.path.join(entry.path, KEPT_MARKER)
                is_base = os.path.isfile(kept) and os.path.getsize(kept) > 0
                found.append(StepFolder(int(match.group(1)), entry.path, contents, is_base))
    return sorted(found, key=lambda folder: folder.step)


def newest_finished_step(folder: str) -> int:
    """Return the highest finished step (its files may still be damaged); -1 if there is none."""
    return max((f.step for f in list_steps(folder) if f.is_finished), default=-1)


def mark_unfinished(folder: str, *more: str) -> None:
    """Mark a folder as unfinished. more: further markers; retention never removes a folder with `KEPT_MARKER`."""
    if not storage.is_address(folder):
        os.makedirs(folder, exist_ok=True)
    for marker in (UNFINISHED_MARKER, *more):
        storage.write_text(storage.join(folder, marker), "")


def mark_base(folder: str) -> None:
    """If `folder` is a step, mark it as the base model of adapters, so that no run's retention removes it."""
    if not re.fullmatch(r"step-\d+", os.path.basename(storage.resolved(folder))):
        return
    try:
        storage.write_text(storage.join(folder, KEPT_MARKER), "the base model of adapters\n")
    except OSError as error:
        logger.warning(
            f"{folder}, the base model of the adapters, cannot be marked ({error}): make sure "
            "that the run that wrote it does not remove it"
        )


def start_writing(folder: str) -> None:
    """Create `folder`, mark it unfinished, and remove the files of an older checkpoint in it."""
    mark_unfinished(folder)
    _remove_weights(folder)  # a later load must not use an old `.metadata` with new files


def remove_failed_save(folder: str) -> None:
    """If `folder` is unfinished, remove its checkpoint files, and the folder if nothing else is left."""
    if contents_of(folder) == Contents.UNFINISHED:
        _remove_weights(folder)
        if set(os.listdir(folder)) <= {UNFINISHED_MARKER, KEPT_MARKER}:
            remove_folder(folder)


def _remove_weights(folder: str) -> None:
    for entry in list(os.scandir(folder)):
        is_shards = entry.name == "sharded"
        if is_shards and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif is_shards or _is_weight_file(entry.name):
            os.unlink(entry.path)


def _is_weight_file(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)


def finish_writing(folder: str, hashes: dict[str, str]) -> None:
    """Write the hashes (file name -> hash), synced, then remove the marker: `folder` is complete."""
    lines = [f"# {len(hashes)} files"]
    lines += [f"{digest}  {name}" for name, digest in sorted(hashes.items())]
    storage.write_text(os.path.join(folder, HASHES_FILE), "\n".join(lines) + "\n")
    os.unlink(os.path.join(folder, UNFINISHED_MARKER))


def remove_folder(folder: str) -> None:
    mark_unfinished(folder)
    if storage.is_address(folder):
        # A step without hash file is unfinished. Delete hash files by name, because a listing may lack them.
        listed = storage.find(folder).keys() - {*HASHES_FILES, UNFINISHED_MARKER}
        for name in (*HASHES_FILES, *listed, UNFINISHED_MARKER):
            storage.delete(storage.join(folder, name))
        return
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != UNFINISHED_MARKER:
            os.unlink(entry.path)
    os.unlink(os.path.join(folder, UNFINISHED_MARKER))
    os.rmdir(folder)


def find_damage(folder: str, hashes: dict[str, str] | None = None) -> str | None:
    """Return what is wrong with the files of `folder`; None if they are intact or have no hashes.

    Collective: each rank hashes its share. hashes: the recorded hashes; None reads them from disk.
    """

    def problem(name: str) -> str | None:
        try:
            digest = expected[name]
            if hash_file(storage.join(folder, name), _ALGORITHMS[len(digest)]) != digest:
                return f"{name} does not have the content that was written (its hash differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None

    expected = from_rank_zero(lambda: recorded_hashes(folder)) if hashes is None else hashes
    problems = filter(None, in_two_threads(problem, own_share(list(expected))))
    return next(filter(None, all_ranks(next(problems, None))), None)


def in_two_threads(work: Callable[[T], U], items: list[T]) -> list[U]:
    """Return `work(item)` for the items at even indices, then at odd indices. Raises the first error.

    Also works during interpreter shutdown, when an executor accepts no work.
    """

    @torch.no_grad()
    def do(part: int) -> list[U]:
        return [work(item) for item in items[part::2]]

    second = run_beside(lambda: do(1))
    try:
        first = do(0)
    finally:
        wait([second])
    return first + second.result()


def own_share(names: list[str], n_ranks: int | None = None) -> list[str]:
    """Return this rank's share of the names, divided among the first `n_ranks` ranks; None: all ranks."""
    if not dist.is_initialized():
        return names
    rank, n_ranks = dist.get_rank(), n_ranks or dist.get_world_size()
    return sorted(names)[rank::n_ranks] if rank < n_ranks else []


def hashes_file_in(folder: str) -> str | None:
    """Return the name of the folder's hash file, without listing the folder; None if there is none."""
    return next((n for n in HASHES_FILES if storage.exists(storage.join(folder, n))), None)


def recorded_hashes(folder: str) -> dict[str, str]:
    """Return file name -> hash; empty if the folder has no hash file. ValueError for damage."""
    entries: list[re.Match[str] | None] = []
    if hashes_file := hashes_file_in(folder):
        with open_file(storage.join(folder, hashes_file), errors="replace") as file:
            header, *lines = file.read().splitlines() or [""]
        entries = [re.fullmatch(r"([0-9a-f]{32}|[0-9a-f]{64})  ([^/]+)", line) for line in lines]
        if header != f"# {len(entries)} files" or not all(entries):
            raise ValueError(f"{hashes_file} is damaged")
    if not entries and contents_of(folder) == Contents.DAMAGED:
        raise ValueError(f"{DCP_METADATA} is missing")
    return {entry.group(2): entry.group(1) for entry in entries}


def upload_folder(folder: str, address: str, group: dist.ProcessGroup | None = None) -> None:
    """Copy a finished folder to `address`, replacing the weights there. Collective over `group`.

    Each rank uploads its own `.distcp` files from its disk; rank 0 uploads the other files. Ranks on
    machines that do not see rank 0's disk then remove their files.
    """
    rank, n_ranks, start = 0, 1, time.monotonic()
    if dist.is_initialized():
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)

    def begin() -> set[str]:
        mark_unfinished(address)  # mark first: the old checkpoint must not count as complete
        for name in filter(_is_weight_file, storage.names_in(address)):
            storage.delete(storage.join(address, name))
        storage.sweep(address)
        own = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
        own = {name for name in own if not name.endswith(UNFINISHED)} - {UNFINISHED_MARKER}
        return own | recorded_hashes(folder).keys()

    def rank_of(name: str) -> int:
        match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
        return int(match[1]) if match and int(match[1]) < n_ranks else 0

    def copy(names: Collection[str]) -> None:
        for name in sorted(names):
            storage.upload(os.path.join(folder, name), storage.join(address, name))

    names = on_all_ranks(lambda: begin() if rank == 0 else set(), group)[0]
    own = {name for name in names if rank_of(name) == rank} - {*HASHES_FILES}
    on_all_ranks(lambda: copy(own), group)

    def end() -> None:
        copy(names & {*HASHES_FILES})
        storage.delete(storage.join(address, UNFINISHED_MARKER))
        logger.info(f"{folder} was uploaded to {address} in {time.monotonic() - start:.2f} s")

    # Check before the last collective, after which rank 0 may remove the folder.
    has_hashes = not names.isdisjoint(HASHES_FILES)
    is_on_other_disk = rank > 0 and has_hashes and hashes_file_in(folder) is None
    on_all_ranks(lambda: end() if rank == 0 else None, group)
    if is_on_other_disk:
        for name in own:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        with suppress(OSError):  # other ranks of this machine still have files there
            os.rmdir(folder)


class HashedFile(io.FileIO):
    """A new file, hashed while it is written: a hash taken from the disk would hide write errors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb", opener=open_descriptor)
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        """Write as much of `data` as one system call does; `io.BufferedWriter` calls again for the rest."""
        n_written = super().write(data)
        self._hash.update(memoryview(data)[:n_written])
        return n_written

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}  # file name -> hash

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        hashed = HashedFile(path)
        with io.BufferedWriter(hashed, _BUFFER) as file:
            try:
                yield file
            except RuntimeError as error:
                # torch's zip writer raises RuntimeError; raise the OSError that caused it instead.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        self.hashes[os.path.basename(path)] = hashed.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.hashes[os.path.basename(new_path)] = self.hashes.pop(os.path.basename(path))


def is_plain(value: Any) -> bool:
    """True for None, numbers, strings, and tuples of them: their `repr` determines the value."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _in_two_files(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Divide the entries evenly over two files, for two threads; if a file would be small, use one."""
    sizes = [0, 0]
    parts: list[list[WriteItem]] = [[], []]

    def size_of(item: WriteItem) -> int:
        data = item.tensor_data
        return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize

    for item in sorted(items, key=size_of, reverse=True):
        place = sizes[1] < sizes[0]
        sizes[place] += size_of(item)
        parts[place].append(item)
    return parts if min(sizes) >= _BYTES_FOR_TWO_FILES else [items]


class HashingWriter(FileSystemWriter):
    """DCP's file writer, which also hashes the files, and sets and removes the unfinished marker.

    record: settings of the run, written to `run.json`.
    copy_states: copies the states for an asynchronous save in a thread of this process.
    """

    def __init__(
        self,
        path: str,
        record: dict[str, Any] | None = None,
        copy_states: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(path)
        self.fs = _HashingFileSystem()
        self.record = record
        self._copy_states = copy_states

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return (self._copy_states or super().stage)(state_dict)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # The other ranks write only after the coordinator has sent them a plan.
        self._started = time.monotonic()
        if is_coordinator:
            start_writing(str(self.path))
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's files; send (DCP's results, file name -> hash) to the coordinator."""
        pickled: dict[str, Any] = {}

        def resolve(item: WriteItem) -> Any:
            """Return the item's data. Equal plain values, such as optimizer settings, are pickled once."""
            if item.type != WriteItemType.BYTE_IO or not is_plain(value := find(item.index)):
                return planner.resolve_data(item)
            if (key := repr(value)) not in pickled:
                pickled[key] = planner.resolve_data(item)
            return pickled[key]

        def write(number: int) -> list[WriteResult]:
            torch.serialization.set_crc32_options(False)  # the file's hash replaces the CRC
            name, results = f"{plan.storage_data.prefix}{number}.distcp", []
            with self.fs.create_stream(os.path.join(self.path, name), "wb") as file:
                for item in parts[number]:
                    start, data = file.tell(), resolve(item)
                    if isinstance(data, torch.Tensor):
                        data = data.detach().cpu()
                        is_view = data.untyped_storage().nbytes() != data.nbytes
                        torch.save(data.clone() if is_view else data, file)
                    else:
                        file.write(data.getbuffer())
                    place = torch_parts.StorageInfo(name, start, file.tell() - start)
                    results.append(WriteResult(item.index, place.length, place))
                file.flush()
                os.fsync(file.fileno())
            return results

        find, parts = planner.lookup_object, _in_two_files(plan.items)
        devices = {find(item.index).device for item in plan.items if item.tensor_data is not None}
        for device in devices - {torch.device("cpu")}:  # because writing threads use other streams
            torch.accelerator.synchronize(device)
        has_crc32 = torch.serialization.get_crc32_options()
        try:
            of_files = in_two_threads(write, [*range(len(parts))])
        finally:
            torch.serialization.set_crc32_options(has_crc32)
        results = [result for of_file in of_files for result in of_file]
        written: Future[Any] = Future()
        written.set_result((results, dict(self.fs.hashes)))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, [of_rank for of_rank, _ in results])
        hashes = {name: digest for _, of_rank in results for name, digest in of_rank.items()}
        if self.record:
            with self.fs.create_stream(os.path.join(self.path, RUN_RECORD), "wb") as file:
                file.write(json.dumps(self.record, indent=1).encode())
            hashes[RUN_RECORD] = self.fs.hashes[RUN_RECORD]
        hashes[DCP_METADATA] = self.fs.hashes[DCP_METADATA]
        finish_writing(str(self.path), hashes)
        size = sum(entry.size_in_bytes for of_rank, _ in results for entry in of_rank)
        logger.info(
            f"Checkpoint {self.path} is complete: {size / GIB:.3f} GiB from {len(results)} "
            f"rank(s) in {time.monotonic() - self._started:.2f} s"
        )
