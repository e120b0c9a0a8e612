"""Locks a folder, so only one job at a time uses it."""

import errno
import fcntl
import os
import socket
import time

from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_descriptor
from torchtitan.tools.logging import logger, warn_once

LOCK_FILE = ".lock"

# Path -> (file descriptor, number of FolderLocks). A process loses its lock on a file when it closes
# any descriptor of that file, so all FolderLocks of a folder share one descriptor.
_held: dict[str, tuple[int, int]] = {}


class FolderLock:
    """Locks `folder`, which is created if needed, until `release` or the end of this process.

    Uses a POSIX record lock: NFS supports these locks, and child processes don't inherit them. The lock
    file names the holder, and is never deleted. Raises RunError if another process holds the lock.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path: str | None = os.path.join(os.path.realpath(folder), LOCK_FILE)
        if self._path in _held:
            file, holders = _held[self._path]
            _held[self._path] = file, holders + 1
            return
        file = open_descriptor(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another job"
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise RunError(
                    f"{folder} is in use by {owner}, and two jobs would overwrite and remove each "
                    "other's files. Wait for that job or stop it, or give this job a folder of its "
                    "own (job.dump_folder, and checkpoint.folder if it is a path)"
                ) from None
            self._path = None
            warn_once(
                logger,
                f"{folder} cannot be locked ({error.strerror}); do not start a second job in it",
            )
            return
        _held[self._path] = file, 1
        os.ftruncate(file, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(
            file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0
        )

    def release(self) -> None:
        """Unlock the folder, unless another FolderLock of this process holds it. Idempotent."""
        if self._path is None:
            return
        file, holders = _held.pop(self._path)
        if holders > 1:
            _held[self._path] = file, holders - 1
        else:
            os.ftruncate(file, 0)
            os.close(file)
        self._path = None
