"""Opening files in folders that somebody else may have prepared.

A name in a run's folder, or in downloaded data, may be a link to one of the user's own files, or a
pipe or device whose reader waits for ever.
"""

import errno
import os
import stat
from typing import IO, Any


def open_file(path: str | os.PathLike[str], mode: str = "r", **options: Any) -> IO[Any]:
    """Open a regular file as `open` does, without ever waiting or writing through a link.

    Raises OSError, with the reason, for anything but a regular file, and for a link when writing.
    """
    return open(path, mode, opener=open_descriptor, **options)


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Return `os.open` by the rules of `open_file`. Links among the parent folders are followed."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        # Without NONBLOCK, opening a pipe waits for its other end. Regular files ignore the flag.
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "it is a link, and files are not written through links; remove it"
            raise OSError(errno.ELOOP, reason, path) from None
        if error.errno != errno.ENXIO:
            raise
    else:
        mode = os.fstat(file).st_mode
        if stat.S_ISREG(mode):
            return file
        os.close(file)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a regular file", path)
