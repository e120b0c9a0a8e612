"""Opens files in untrusted folders safely, and finds the package's own assets.

A name in a run's folder or in downloaded data may be a link to one of the user's own files, or a pipe
or device on which a reader waits forever.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash

from torchtitan.tools import storage

if TYPE_CHECKING:
    from torch import Tensor

_ASSETS = Path(__file__).parents[1] / "assets"
# Suffix of a file that is being written.
UNFINISHED = ".unfinished"
# In bytes. Vocabularies and indexes have about 10 MB.
_LARGEST_JSON = 2**28


def open_file(path: str | os.PathLike[str], mode: str = "r", **options: Any) -> IO[Any]:
    """Open a regular file, or an address for reading, as `open` does. Never blocks on a pipe or device.

    Raises OSError, with the reason, for anything but a regular file, and for a link when writing.
    """
    if storage.is_address(path):
        return storage.open_address(os.fspath(path), mode, **options)
    return open(path, mode, opener=open_descriptor, **options)


def hash_file(path: str | os.PathLike[str], algorithm: Any = xxhash.xxh3_128) -> str:
    """Return the hash of a file in hexadecimal. algorithm: as for `hashlib.file_digest`."""
    with open_file(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file in UTF-8. Raises ValueError, with the path, for other bytes."""
    try:
        with open_file(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it to UTF-8") from None


def regular_file(path: str | os.PathLike[str]) -> Any:
    """Return what a library should open: `path`, or a file object if `path` is an address.

    Raises OSError for a path that `open_file` refuses.
    """
    if storage.is_address(path):
        return storage.RangedFile(os.fspath(path))
    os.close(open_descriptor(path, os.O_RDONLY))
    return os.fspath(path)


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Return a file descriptor by the rules of `open_file`. Parent folders may be links."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        # Check before opening: opening a pipe would wake its writer.
        before = os.stat(path)
    except OSError:  # `os.open` below reports the reason, or creates the file
        pass
    else:
        _check_regular(before, path)
    try:
        # Without NONBLOCK, opening a pipe waits for its other end. Regular files ignore the flag.
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP or not os.path.islink(path):
            raise
        reason = "it is a link, and files are not written through links; remove it"
        raise OSError(errno.ELOOP, reason, path) from None
    try:
        _check_regular(os.fstat(file), path)  # check again: the path may have been replaced
    except OSError:
        os.close(file)
        raise
    return file


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        reason = "it is a pipe, socket or device, not a regular file"
        raise OSError(errno.EINVAL, reason, path)


@contextmanager
def whole_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a new file, which atomically replaces `path` if the block succeeds."""
    unfinished = f"{os.fspath(path)}.{os.getpid()}{UNFINISHED}"
    try:
        with open_file(unfinished, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)


def save_tensors(tensors: "dict[str, Tensor]", path: str) -> None:
    """Write a safetensors file. Raises OSError if writing fails, for example on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), path) from error


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ValueError, with the path, for anything else."""
    with open_file(path, encoding="utf-8") as file:
        try:
            if (size := file.seek(0, os.SEEK_END)) > _LARGEST_JSON:
                raise ValueError(f"it has {size} bytes, and at most {_LARGEST_JSON} are read")
            file.seek(0)
            content = json.load(file)
            if not isinstance(content, dict):
                raise ValueError(f"it must hold a JSON object, got a {type(content).__name__}")
        except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8; nested too deeply
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{path} is not valid JSON: {reason}; fetch the file again") from None
    return content


def cache_folder() -> Path:
    """Return the cache folder, for files that later runs can reuse; it may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "torchtitan")


def find_shipped(path: str) -> str:
    """Return `path`; if it is tests/assets/NAME and missing, return the package's copy of NAME."""
    given = Path(path)
    copy = _ASSETS / given.name
    is_default = given.parent == Path("tests/assets") and copy.is_dir()
    return str(copy) if is_default and not given.exists() else path
