"""Documents in files, by index. The files are on a disk, or at an address (see `tools.storage`).

JSON lines and plain text are read in place. Compressed files, JSON lists and Parquet files (only the
columns that are needed) are first copied as plain files to the cache, once per machine for all runs.
Parquet at an address is read in place, by row groups; the most recently used ones stay in memory.
"""

import bz2
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from torchtitan.tools import storage
from torchtitan.tools.files import cache_folder, open_file, regular_file
from torchtitan.tools.logging import logger

# A longer text file becomes several documents of about this size.
TEXT_DOCUMENT_BYTES = 64 * 1024
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 5  # samples of a file, for the digest of `record_of`
_TEXT = ("text",)  # the Parquet column that text datasets read
_ROW_GROUP_BYTES = 2**28  # limit on row groups in memory, per process; the latest always stays


class JoinedDocuments:
    """Documents of several files, by index. files: have `len()`, `read(number)` and `where(number)`."""

    def __init__(self, files: list[Any]) -> None:
        self._files = files
        self._ends = list(accumulate(map(len, files)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, index: int) -> tuple[Any, int]:
        """Return (file, index of the document in this file)."""
        number = bisect_right(self._ends, index)
        if index < 0 or number == len(self._ends):
            raise IndexError(index)
        return self._files[number], index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> Any:
        file, number = self._locate(index)
        return file.read(number)

    def where(self, index: int) -> str:
        """Return a document's name for messages."""
        file, number = self._locate(index)
        return file.where(number)


class _File:
    """A file of documents. name: its path in messages. content: the file to read, perhaps a cached copy."""

    def __init__(self, name: str, content: str) -> None:
        self.name, self.content = name, content
        self._ranged = storage.RangedFile(content) if storage.is_address(content) else None
        self.before = self._ranged.found if self._ranged else os.stat(regular_file(content))

    def bytes_at(self, start: int, end: int) -> bytes:
        """Return a part of the file; raises ValueError if the file has changed since the job started."""
        if self._ranged is not None:
            return self._ranged[start:end]
        before = self.before
        try:
            # Not `open_file`, whose check of the file type takes half of a read's time; `__init__`
            # has checked the type.
            with open(self.content, "rb") as file:
                stat = os.fstat(file.fileno())
                file.seek(start)
                content = file.read(end - start)
        except FileNotFoundError:
            now = "has vanished"
        else:
            is_whole = len(content) == max(0, min(end, stat.st_size) - start)
            found = stat.st_size, stat.st_mtime_ns
            if is_whole and found == (before.st_size, before.st_mtime_ns):
                return content
            now = f"has {stat.st_size:,} now, and was written to since"
        raise ValueError(
            f"{self.content} had {before.st_size:,} bytes when the job started, and {now}; do not change "
            "data while a job reads them"
        )


class _Lines(_File):
    """A file of JSON lines; blank lines are skipped. unit: the word for a line in messages."""

    def __init__(self, name: str, content: str, unit: str) -> None:
        super().__init__(name, content)
        self._unit = unit
        # Byte offsets of the lines that are not blank, and the size of the file.
        self._starts = starts = array("Q")
        position = 0
        with open_file(content, "rb") as file:
            for line in file:
                if not line.isspace():
                    starts.append(position)
                position += len(line)
        starts.append(position)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int) -> Any:
        line = self.bytes_at(*self._starts[number : number + 2])
        try:
            # `line` may end with blank lines, whose form feeds are not valid JSON.
            return json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.where(number)}: not valid JSON ({error}); every line must be one object"
            ) from None

    def where(self, number: int) -> str:
        start = self._starts[number]
        with open_file(self.content, "rb") as file:
            ends = takewhile(lambda end: end <= start, accumulate(map(len, file)))
            return f"{self.name}, {self._unit} {1 + sum(1 for _ in ends)}"


class _RowGroup:
    """The rows of one row group of a Parquet file at an address. first: index of its first row."""

    def __init__(self, name: str, columns: tuple[str, ...], group: int, first: int, n: int) -> None:
        self._key, self.name, self._first, self._n = (name, columns, group), name, first, n

    def __len__(self) -> int:
        return self._n

    def read(self, number: int) -> Any:
        return json.loads(_row_group(*self._key)[number])

    def where(self, number: int) -> str:
        return f"{self.name}, row {1 + self._first + number}"


_row_groups: dict[tuple[str, tuple[str, ...], int], list[bytes]] = {}
"""The rows, as JSON, of the row groups in memory, from the least to the most recently used."""


def _row_group(path: str, columns: tuple[str, ...], group: int) -> list[bytes]:
    key = path, columns, group
    if (lines := _row_groups.pop(key, None)) is None:
        lines = [*_parquet_as_lines(path, columns, [group])]
        room = _ROW_GROUP_BYTES - sum(map(sys.getsizeof, lines))
        for other, other_lines in reversed([*_row_groups.items()]):
            room -= sum(map(sys.getsizeof, other_lines))
            if room < 0:
                _row_groups.pop(other, None)  # another thread may have removed the group
    _row_groups[key] = lines
    return lines


class _Text(_File):
    """A UTF-8 text file, cut at the first line end after each multiple of `TEXT_DOCUMENT_BYTES`."""

    def __len__(self) -> int:
        return -(-self.before.st_size // TEXT_DOCUMENT_BYTES)

    def read(self, number: int) -> dict[str, Any]:
        start, end = self._cut(number), self._cut(number + 1)
        try:
            return {"text": self.bytes_at(start, end).decode("utf-8" if start else "utf-8-sig")}
        except UnicodeDecodeError as error:
            place = f"{error.reason} at byte {start + error.start}"
            raise ValueError(f"{self.name} is not UTF-8 text: {place}; convert it") from error

    def where(self, number: int) -> str:
        return str(self.name)

    def _cut(self, part: int) -> int:
        """Return the byte offset at which a part begins: after a line end if possible, else between characters."""
        if part == 0:
            return 0
        nominal = part * TEXT_DOCUMENT_BYTES
        window = self.bytes_at(nominal - 1, nominal - 1 + TEXT_DOCUMENT_BYTES)
        line_end = window.find(b"\n")
        if line_end >= 0:
            return nominal + line_end
        if len(window) < TEXT_DOCUMENT_BYTES:  # no line ends before the end of the file
            return nominal - 1 + len(window)
        shift = 1
        # Skip UTF-8 continuation bytes, because a cut must not split a character.
        while shift < 4 and window[shift] & 0b1100_0000 == 0b1000_0000:
            shift += 1
        return nominal - 1 + shift


def load_local_documents(path: str, columns: tuple[str, ...] = _TEXT) -> JoinedDocuments:
    """Return the documents of a file, or of all files in and below a folder.

    columns: the columns to read from Parquet files. Unless this is just "text", plain-text files are refused.
    Raises FileNotFoundError if `path` does not exist, ValueError for files of unknown or several kinds.
    """
    known = {*_KINDS.values()} - ({"text"} if columns != _TEXT else set())
    wanted = f"a data file or a folder with files of one kind ({', '.join(sorted(known))})"
    if not path:
        raise ValueError(f"this training.dataset needs training.dataset_path, {wanted}")
    files = _files_in(path)
    if not files and not os.path.exists(path):
        raise FileNotFoundError(
            f"training.dataset_path (or the dataset's own path): there is no file or folder {path!r} "
            f"(looked in {os.getcwd()}); correct the path"
        )
    paths = [*files]
    if path not in files:  # `path` is a folder
        paths = [file for file in paths if _kind_of(file)]
        if len({_kind_of(file) for file in paths}) > 1:  # a dataset from the hub has a README.md
            paths = [file for file in paths if os.path.basename(file) != "README.md"]
        paths = _without_held_out(paths, path)
    kinds = {_kind_of(file) for file in paths}
    if len(kinds) != 1 or not kinds <= known:
        found = ", ".join(sorted(str(kind) for kind in kinds if kind)) or "no such file"
        raise ValueError(
            f"training.dataset_path (or the dataset's own path) must be {wanted}, got {path!r} with {found}"
        )
    return JoinedDocuments([part for file in paths for part in _open(file, columns)])


def _open(path: str, columns: tuple[str, ...]) -> Sequence[Any]:
    """Return the documents of a file, in one or several parts for `JoinedDocuments`."""
    content, unit, ending = path, "line", _ending(path)
    if ending == ".parquet":
        if columns != _TEXT:
            logger.info(
                f"{path}: keys whose value is null are left out; use JSON lines to keep them"
            )
        if storage.is_address(path):
            about = _parquet_file(path).metadata
            sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
            firsts = accumulate(sizes, initial=0)
            return [
                _RowGroup(path, columns, group, first, n)
                for group, (first, n) in enumerate(zip(firsts, sizes, strict=False))
            ]
        content = _copy_in_cache(path, repr(columns), _parquet_as_lines(path, columns))
        return [_Lines(path, content, "row")]
    if ending in _DECOMPRESS:
        content = _copy_in_cache(path, "", _unpacked(path))
    if _kind_of(path) == "text":
        return [_Text(path, content)]
    with open_file(content, "rb") as file:
        head = file.read(1024)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(
            f"{path} is in UTF-16 or UTF-32, and JSON must be in UTF-8; convert it: "
            "iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        unit = "entry"
        content = _copy_in_cache(path, unit, _entries_as_lines(content, path))
    return [_Lines(path, content, unit)]


# ---- cached copies ----


def _copy_in_cache(path: str, options: str, content: Iterator[bytes]) -> str:
    """Return the path of a cached copy; key: `path`, the original's size and modification time, `options`."""
    found = storage.stat(path)
    key = repr((storage.resolved(path), found.st_size, found.st_mtime_ns, options))
    copy = cache_folder() / f"data_{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    try:
        if copy.exists():  # check first: the cache may be read-only
            return str(copy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open_file(f"{copy}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of a machine writes, the others wait
            if not copy.exists():
                if storage.is_address(path):
                    _check_room(path, copy.parent)
                logger.info(f"copying {path} as plain text to {copy}")
                unfinished = copy.with_suffix(".unfinished")
                with open_file(unfinished, "wb") as file:
                    file.writelines(content)
                unfinished.replace(copy)
    except storage.StorageError:
        raise
    except OSError as error:
        raise ValueError(
            f"{path} cannot be copied to {copy}: {error.strerror}; set XDG_CACHE_HOME to a folder with "
            "more room, or give a file that is plain JSON lines"
        ) from None
    return str(copy)


def _check_room(path: str, cache: Path) -> None:
    """Raise ValueError if the copies in the cache take more than half of the disk."""
    used = 0
    for copy in cache.glob("data_*"):
        with suppress(FileNotFoundError):  # another process has finished or removed this copy
            used += copy.stat().st_size
    if used > shutil.disk_usage(cache).total // 2:
        raise ValueError(
            f"{path} is not copied to {cache}, because the copies there take more than half of the disk "
            f"({used / 2**30:.0f} GiB): remove the copies that no job reads, or use Parquet, plain JSON lines "
            "or the output of `torchtitan tokenize`, which need no copy"
        )


def _unpacked(path: str) -> Iterator[bytes]:
    try:
        with open_file(path, "rb") as packed, _DECOMPRESS[_ending(path)](packed) as content:
            while block := content.read(2**20):
                yield block
    except storage.StorageError:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; fetch the file again") from None


def _entries_as_lines(content: str, name: str) -> Iterator[bytes]:
    try:
        with open_file(content, "rb") as file:
            entries = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} begins like a list, and is not valid JSON: {error}; correct it, or write JSON lines"
        ) from None
    for entry in entries:
        yield json.dumps(entry).encode() + b"\n"


def _open_zst(packed: BinaryIO) -> Any:
    import pyarrow  # slow to import; Python itself reads zst from 3.14 on

    return pyarrow.CompressedInputStream(packed, "zstd")


_DECOMPRESS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst
}  # fmt: skip


def _parquet_file(path: str) -> Any:
    import pyarrow.parquet  # slow to import

    return pyarrow.parquet.ParquetFile(regular_file(path))


def _parquet_as_lines(
    path: str, columns: tuple[str, ...], row_groups: list[int] | None = None
) -> Iterator[bytes]:
    import pyarrow  # slow to import

    number = 0
    try:
        file = _parquet_file(path)
        names = file.schema_arrow.names
        read = [name for name in columns if name in names]
        if not read:
            raise ValueError(
                f"{path} needs one of the columns {', '.join(columns)}, got {names}; rename a column, or "
                "name yours in training.chat_keys if these are chats"
            )
        for batch in file.iter_batches(1024, row_groups, read):
            for row in batch.to_pylist():
                number += 1
                yield json.dumps(_without_none(row), ensure_ascii=False).encode() + b"\n"
    except storage.StorageError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}; fetch it again") from None
    except TypeError as error:  # JSON has no dates, bytes, ...
        raise ValueError(
            f"{path}, row {number}: {error} (columns: {', '.join(read)}); convert the column to strings"
        ) from None


def _without_none(value: Any) -> Any:
    """Return a value without the keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


# ---- the files of a folder ----

_KINDS = {".jsonl": "JSON", ".json": "JSON", ".txt": "text", ".md": "text", ".parquet": "Parquet"}


def _ending(path: str) -> str:
    return os.path.splitext(path)[1]


def _kind_of(path: str) -> str | None:
    """Return the kind of a file by its extension; None for an unknown extension."""
    inner, ending = os.path.splitext(path)
    if ending in _DECOMPRESS and _ending(inner) != ".parquet":
        ending = _ending(inner)
    return _KINDS.get(ending)


# The names of splits that `datasets` recognises in the paths of files.
_TRAINED, _HELD_OUT = (
    re.compile(rf"(^|[-._ 0-9/])({names})([-._ 0-9/]|$)")
    for names in ("train|training", "test|testing|eval|evaluation|valid|validation|val|dev")
)


def _without_held_out(paths: list[str], root: str) -> list[str]:
    """Leave out test and validation files if the folder also has training files."""
    names = {path: path.removeprefix(root).lstrip("/") for path in paths}
    held_out = [path for path in paths if _HELD_OUT.search(names[path])]
    if held_out and any(_TRAINED.search(name) for name in names.values()):
        logger.warning(
            f"{root}: of {len(paths)} files, {len(held_out)} are named as a test or validation split and "
            f"are not read ({', '.join(names[path] for path in held_out[:5])}); to read one, name its path"
        )
        return [path for path in paths if path not in held_out]
    return paths


def _files_in(root: str) -> dict[str, Any]:
    """Return {path: stat} of a file, or of a folder's files at any depth except hidden ones, sorted."""
    if storage.is_address(root):
        found = storage.find(root)
        names = sorted(found, key=lambda name: name.split("/"))
        visible = [name for name in names if not re.search(r"(^|/)\.", name)]
        return {storage.join(root, name) if name else root: found[name] for name in visible}
    paths = [] if os.path.isdir(root) else [root]
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "."]
        paths += [os.path.join(folder, name) for name in names if name[0] != "."]
    files = {}
    for path in sorted(paths, key=lambda path: path.split(os.sep)):
        with suppress(FileNotFoundError):  # the file is a broken link
            files[path] = os.stat(path)
            if not S_ISREG(files[path].st_mode):
                regular_file(path)  # raises an error that names the kind of file
    return files


def record_of(path: str, is_movable: bool = False) -> dict[str, Any]:
    """Return the number of files at `path`, their bytes and a SHA-256 digest; {} without such a path.

    The digest covers names, sizes, modification times and samples of the content. is_movable: True omits
    the times, so that copies have the same digest, and samples at most 128 files.
    """
    if not path or not (storage.is_address(path) or os.path.exists(path)):
        return {}
    files = _files_in(path)
    digest = hashlib.sha256()
    every = -(-len(files) // 128) if is_movable else 1
    read_samples = _read_samples([*files.items()][::every])
    for number, (file, found) in enumerate(files.items()):
        name = file.removeprefix(path).lstrip(os.sep) or "."
        time = None if is_movable else found.st_mtime_ns
        digest.update(repr((os.fsencode(name), found.st_size, time)).encode())
        if number % every == 0:
            digest.update(next(read_samples))
    num_bytes = sum(found.st_size for found in files.values())
    return {"files": len(files), "bytes": num_bytes, "sha256": digest.hexdigest()}


def _read_samples(files: list[tuple[str, Any]]) -> Iterator[bytes]:
    """Yield the joined samples of each file: evenly spaced parts of a long file, all of a short file."""
    for first in range(0, len(files), 128):  # many files at once, because requests are slow
        ranges = [_sampled(path, found.st_size) for path, found in files[first : first + 128]]
        parts = iter(storage.read_ranges([part for of_file in ranges for part in of_file]))
        yield from (b"".join(next(parts) for _ in of_file) for of_file in ranges)


def _sampled(path: str, size: int) -> list[tuple[str, int, int]]:
    """Return (path, start, end) of each sample; [] for a file that cannot be read."""
    places, length = [0], size
    if size > _NUM_SAMPLES * _SAMPLE_BYTES:
        length = _SAMPLE_BYTES
        places = [(size - length) * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)]
    is_readable = size > 0 and (storage.is_address(path) or os.access(path, os.R_OK))
    return [(path, place, place + length) for place in places] if is_readable else []
