"""Files on a disk, or at an address: s3://bucket/folder, gs://, hf://, file://, memory:// and so on.

Only this module distinguishes addresses from disks. Paths on a disk go through `os`. Addresses go through
fsspec, which is imported only for them. Object stores have no rename: an object appears whole or not at all,
and a folder exists while it holds objects.

A call that fails because a store is busy or a connection is lost is retried for `READ_SECONDS` (uploads:
`UPLOAD_SECONDS`). Then it raises StorageError with the reason and the address.
"""

import errno
import fcntl
import hashlib
import io
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any, NamedTuple, TypeVar

from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.logging import logger

T = TypeVar("T")

# How many seconds a call is retried after its first failure. Uploads are retried for longer, because
# training continues meanwhile.
READ_SECONDS = 20.0
UPLOAD_SECONDS = 600.0
# How many long attempts restart the retry time; see `_call`.
_LONG_ATTEMPTS = 3
# Bytes of a cached block, and number of blocks that a process caches.
_BLOCK, _BLOCKS_KEPT = 2**20, 64
_STREAM_BUFFER = 8 * 2**20
# Endings of the files beside a Hugging Face model's weights.
_FETCHED = (".json", ".jinja", ".txt", ".model")


_REFUSALS = re.compile("credential|forbidden|unauthori[sz]ed|access denied", re.IGNORECASE)


class StorageError(OSError, RunError):
    """An address cannot be read or written. As a RunError, it ends a run without a stack trace."""


class Stat(NamedTuple):
    """A file's size and version: the modification time on a disk, an object's ETag or time as a str."""

    st_size: int
    st_mtime_ns: Any


def is_address(path: str | os.PathLike[str]) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def require_disk(key: str, path: str) -> str:
    """Return the path. Raises ConfigError, which names `key`, for an address."""
    if is_address(path):
        raise ConfigError(
            f"{key} must be on a disk, got the address {path!r}; copy it to a disk and name the copy"
        )
    return path


def resolve(address: str) -> tuple[Any, str]:
    """Return (fsspec's file system, the path in it), without connecting.

    Raises ConfigError if fsspec has no file system for the address.
    """
    try:
        from fsspec.core import url_to_fs

        # The file system is not cached here: each forked process and each thread needs its own.
        options = {"auto_mkdir": True} if address.startswith(("file:", "local:")) else {}
        return url_to_fs(address, use_listings_cache=False, **options)
    except ImportError as error:
        raise ConfigError(
            f"{address} needs a package that is missing ({error}); install torchtitan-embeddable[cloud], "
            "or that package"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{address} is not an address that fsspec knows ({error})") from None


def _call(address: str, work: Callable[[Any, str], T], seconds: float | None = None) -> T:
    """Return `work(file system, path)`, retried for `seconds` (None: `READ_SECONDS`) after a failure.

    An attempt longer than `seconds` is usually a large transfer that was cut off, so it restarts the retry
    time, but at most `_LONG_ATTEMPTS` times: attempts on a store that hangs are long, too.
    """
    file_system, path = resolve(address)
    seconds, deadline, n_long = seconds or READ_SECONDS, math.inf, 0
    while True:
        start = time.monotonic()
        try:
            file_system.invalidate_cache()  # some stores ignore use_listings_cache=False
            return work(file_system, path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            # Keep the class, which callers catch, and add the address, which some stores leave out.
            raise type(error)(error.errno or errno.ENOENT, str(error), address) from None
        except Exception as error:  # each store's client has exceptions of its own
            reason = f"{type(error).__name__}: {error}"
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                reason = "this machine's disk has no room for a copy of the file"
                raise OSError(errno.ENOSPC, reason, address) from error
            now = time.monotonic()
            is_long = now - start > seconds and n_long < _LONG_ATTEMPTS
            if is_long or deadline == math.inf:
                n_long, deadline, pause = n_long + is_long, now + seconds, 0.25
            refused = isinstance(error, (PermissionError, ValueError)) or _REFUSALS.search(reason)
            if isinstance(error, NotImplementedError):
                reason = "fsspec only reads such addresses, or lacks this operation; give another address"
            elif refused:
                remedy = "check the address, the credentials and their permissions"
                reason = f"the store refuses ({reason}); {remedy}"
            elif now + pause > deadline:
                reason = f"the store does not answer ({reason})"
            else:
                logger.warning(f"{address}: {reason}; trying again")
                time.sleep(pause)
                pause = min(2 * pause, 30)
                continue
            raise StorageError(errno.EIO, reason, address) from error


# ---- operations on disks and addresses ----


def join(folder: str, *names: str) -> str:
    if is_address(folder):
        return "/".join((folder.rstrip("/"), *names))
    return os.path.join(folder, *names)


def resolved(path: str) -> str:
    """Return the canonical path, which is the same string for all paths of a file or folder."""
    return path.rstrip("/") if is_address(path) else os.path.realpath(path)


def stat(path: str) -> Stat | None:
    """Return the size and version of a file; None if there is no file."""
    if not is_address(path):
        found = os.stat(path) if os.path.isfile(path) else None
        return found and Stat(found.st_size, found.st_mtime_ns)
    about = _about(path)
    return _stat(about) if about["type"] == "file" else None


def _about(address: str) -> dict[str, Any]:
    try:
        return _call(address, lambda fs, name: fs.info(name))
    except (FileNotFoundError, NotADirectoryError):
        return {"type": "nothing"}


def _stat(about: dict[str, Any]) -> Stat:
    version = next((about[key] for key in ("ETag", "etag", "blob_id") if about.get(key)), None)
    return Stat(about["size"], str(version or about.get("LastModified") or about.get("mtime")))


def is_file(path: str) -> bool:
    return os.path.isfile(path) if not is_address(path) else stat(path) is not None


def is_folder(path: str) -> bool:
    return os.path.isdir(path) if not is_address(path) else _about(path)["type"] == "directory"


def exists(path: str) -> bool:
    """True for a file; on a disk, also for a folder, pipe or device, which `open_file` refuses."""
    return os.path.exists(path) if not is_address(path) else stat(path) is not None


def names_in(folder: str) -> list[str]:
    """Return the names of the files and folders in a folder; [] if it does not exist."""
    if not is_address(folder):
        return os.listdir(folder) if os.path.isdir(folder) else []
    try:
        found = _call(folder, lambda fs, name: fs.ls(name, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name.rstrip("/").rpartition("/")[2] for name in found)


def find(address: str) -> dict[str, Stat]:
    """Return {path relative to `address`: Stat} of all files below it; {"": Stat} if it is a file."""

    def work(fs: Any, root: str) -> dict[str, Stat]:
        found = {}
        for name, about in fs.find(root, detail=True).items():
            if not name.startswith(root):
                raise ValueError(f"the store lists {name}, which is not below {root}")
            if name[-1] != "/":  # some tools write an object "folder/" for an empty folder
                found[name[len(root) :].lstrip("/")] = _stat(about)
        return found

    try:
        return _call(address, work)
    except FileNotFoundError:
        return {}


def write_text(path: str, text: str) -> None:
    """Write a small file and sync it to the disk, or write it as one object at an address."""
    if is_address(path):
        _call(path, lambda fs, name: fs.pipe_file(name, text.encode()))
        return
    from torchtitan.tools.files import open_file

    with open_file(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_writable(address: str) -> None:
    """Write and delete an object below `address`. Raises OSError if the store does not allow it."""
    trial = join(address, f".writable-{os.getpid()}")
    write_text(trial, "Is writing allowed?")
    delete(trial)


def delete(path: str) -> None:
    """Remove a file. At an address, a missing file is ignored."""
    if not is_address(path):
        os.unlink(path)
        return
    with suppress(FileNotFoundError):
        _call(path, lambda fs, name: fs.rm_file(name))


def upload(path: str, address: str) -> None:
    """Copy a file from this disk to an address."""
    _transfer(address, path, is_upload=True)


def _transfer(address: str, path: str, is_upload: bool) -> None:
    def work(fs: Any, name: str) -> None:
        fs.put_file(path, name) if is_upload else fs.get_file(name, path)
        there, here = fs.info(name)["size"], os.path.getsize(path)
        if there != here:
            reason = f"the copy is not whole: {there} bytes there, {here} on this disk"
            raise StorageError(errno.EIO, reason, address)

    _call(address, work, UPLOAD_SECONDS if is_upload else None)


def sweep(address: str) -> None:
    """Abort S3's unfinished multipart uploads below `address`: they are invisible, but cost money."""

    def work(fs: Any, path: str) -> None:
        if not hasattr(fs, "call_s3"):
            return
        bucket, key, _ = fs.split_path(path)
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
        for part in found.get("Uploads") or ():
            where = {"Key": part["Key"], "UploadId": part["UploadId"]}
            fs.call_s3("abort_multipart_upload", Bucket=bucket, **where)

    try:
        _call(address, work)
    # Few users have this permission. A bucket's lifecycle rule can remove unfinished uploads, too.
    except OSError as error:
        logger.warning(f"cannot remove unfinished uploads below {address}: {error.strerror}")


# ---- reading by ranges ----


@lru_cache(_BLOCKS_KEPT)
def _block(address: str, found: Stat, number: int) -> bytes:
    return read_ranges([(address, number * _BLOCK, min((number + 1) * _BLOCK, found.st_size))])[0]


def read_ranges(ranges: list[tuple[str, int, int]]) -> list[bytes]:
    """Return the bytes of each range (path, start, end). The paths are all on disks or all at one store."""
    if not ranges or not is_address(ranges[0][0]):
        return [_bytes_at(*part) for part in ranges]
    addresses, starts, ends = map(list, zip(*ranges, strict=True))

    def work(fs: Any, _: str) -> list[bytes]:
        names = [resolve(address)[1] for address in addresses]
        return fs.cat_ranges(names, starts, ends, on_error="raise")

    parts = _call(addresses[0], work)
    for part, (address, start, end) in zip(parts, ranges, strict=True):
        if len(part) != end - start:
            reason = f"got {len(part)} of {end - start} bytes at {start}; do not change a file during reads"
            raise StorageError(errno.EIO, reason, address)
    return parts


def _bytes_at(path: str, start: int, end: int) -> bytes:
    from torchtitan.tools.files import open_file

    with open_file(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), end - start, start)


class RangedFile(io.RawIOBase):
    """A file at an address. Reads only the requested ranges, and short ranges in blocks that it caches.

    `file[start:end]` and `len(file)` work as for a memory-mapped file.
    Raises FileNotFoundError if there is no such file.
    """

    def __init__(self, address: str) -> None:
        self.address, self._position = address, 0
        if (found := stat(address)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address)
        self.found = found

    def __reduce__(self) -> tuple:
        return RangedFile, (self.address,)

    def __len__(self) -> int:
        return self.found.st_size

    def __getitem__(self, part: slice) -> bytes:
        start, end, _ = part.indices(len(self))
        if start >= end:
            return b""
        if end - start >= _BLOCK:
            return read_ranges([(self.address, start, end)])[0]
        first, last = start // _BLOCK, (end - 1) // _BLOCK
        blocks = b"".join(_block(self.address, self.found, n) for n in range(first, last + 1))
        return blocks[start - first * _BLOCK : end - first * _BLOCK]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        data = self[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_address(address: str, mode: str, **options: Any) -> IO[Any]:
    """Open an object for reading, as `open` does."""
    if mode not in ("r", "rb"):
        raise StorageError(
            errno.EINVAL, "an address cannot be opened for writing; upload a file", address
        )
    file = io.BufferedReader(RangedFile(address), _STREAM_BUFFER)
    return file if mode == "rb" else io.TextIOWrapper(file, **options)


# ---- copies on this disk ----


def staging_folder(address: str) -> str:
    """Return the folder in the cache where files are written before they are uploaded to `address`."""
    return _in_cache("staged", resolved(address))


def _in_cache(kind: str, key: str) -> str:
    from torchtitan.tools.files import cache_folder

    return str(cache_folder() / f"{kind}_{hashlib.sha256(key.encode()).hexdigest()[:24]}")


def fetched(path: str, has_weights: bool = True) -> str:
    """Return a folder on this disk with a Hugging Face model's files: `path`, or its copy in the cache.

    has_weights: False leaves out the *.safetensors.
    """
    if not is_address(path):
        return path
    endings = (*_FETCHED, ".safetensors") if has_weights else _FETCHED
    files = {n: found for n, found in find(path).items() if n.endswith(endings) and "/" not in n}
    if not files:
        raise FileNotFoundError(errno.ENOENT, "there are no files of a Hugging Face model", path)
    copy = _in_cache("fetched", repr((resolved(path), sorted(files.items()))))
    from torchtitan.tools.files import open_file

    os.makedirs(os.path.dirname(copy), exist_ok=True)
    with open_file(f"{copy}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process per machine fetches, and the others wait
        if not os.path.isdir(copy):
            size = sum(found.st_size for found in files.values())
            logger.info(f"copying {path} ({size / 2**30:.2f} GiB) to {copy}")
            os.makedirs(unfinished := f"{copy}.unfinished", exist_ok=True)
            # Files that a killed process has fetched are whole, so they are not fetched again.
            for name in sorted(files.keys() - os.listdir(unfinished)):
                part = f"{unfinished}.part"
                _transfer(join(path, name), part, is_upload=False)
                os.rename(part, os.path.join(unfinished, name))
            os.rename(unfinished, copy)
    return copy
