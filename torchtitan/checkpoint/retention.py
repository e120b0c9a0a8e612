"""Removes old step folders."""

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.checkpoint.dcp import one_error
from torchtitan.checkpoint.folder import (
    HASHES_FILES,
    KEPT_MARKER,
    UNFINISHED_MARKER,
    Contents,
    StepFolder,
    contents_of,
    list_steps,
    mark_unfinished,
    remove_folder,
)
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.tools import storage
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger


class Terminate:
    """An item of the purge queue; it ends the purge thread."""


class SaveDone:
    """In torchtitan 0.2.x, signals the end of a save in another process. Unused here."""


@contextmanager
def warning(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a later save retries the removal
        logger.warning(f"The old checkpoint {path} could not be removed: {error}")


def purge_thread(purge_queue: queue.Queue) -> None:
    """Remove each folder that is put into the queue, until a `Terminate` arrives."""
    while not isinstance(path := purge_queue.get(), Terminate):
        logger.info(f"Removing old checkpoint {path}")
        with warning(path):
            remove_folder(path)


class Retention:
    """Removes old step folders in a thread.

    configured_folders: steps of earlier processes are removed only in these folders.
    written, given, damaged: resolved paths of steps. written: this manager named and wrote the step.
        given: a caller named the step. damaged: a load found the step damaged.
    """

    def __init__(self, *configured_folders: str) -> None:
        self._configured_folders = {storage.resolved(f) for f in configured_folders if f}
        self.written: set[str] = set()
        self.given: set[str] = set()
        self.damaged: set[str] = set()
        self._lock: FolderLock | None = None
        self.thread: threading.Thread | None = None
        self.queue: queue.Queue = queue.Queue()

    def claim(self, folder: str) -> None:
        """Lock `folder` until `close`; RunError if another job writes there. Collective."""
        if self._lock is not None:
            return

        def lock() -> None:
            self._lock = FolderLock(folder)

        with one_error(f"The checkpoint folder {folder} cannot be used"):
            from_rank_zero(lock)

    def leave_alone(self, path: str) -> None:
        """Never remove `path` in this process, because a caller named it."""
        self.given.add(storage.resolved(path))

    def will_write(self, folder: str, warns: bool) -> None:
        """Record that this manager writes `folder`. warns: warn if this replaces a checkpoint."""
        path = storage.resolved(folder)
        if warns and path not in self.written:
            if contents_of(folder) not in (Contents.UNKNOWN, Contents.UNFINISHED):
                logger.warning(f"Replacing the checkpoint {folder}")
        self.written.add(path)
        self.damaged.discard(path)

    def purge(self, folder: str, n_kept: int, saving_to: str | None) -> None:
        """Queue the removal of all but the newest `n_kept` finished steps in `folder`.

        Ignores `saving_to`, which is being written, and steps that this run does not own.
        Interrupted and damaged steps are removed once a newer step is finished.
        """
        folders = [f for f in list_steps(folder) if f.path != saving_to and self._may_remove(f)]
        bad = (Contents.UNFINISHED, Contents.DAMAGED)
        broken = [
            f for f in folders if f.contents in bad or storage.resolved(f.path) in self.damaged
        ]
        # After a resume from an older step, this process's steps are newer than old steps with higher numbers.
        finished = sorted(
            (f for f in folders if f not in broken),
            key=lambda f: (storage.resolved(f.path) in self.written, f.step),
        )
        newest = max((f.step for f in finished), default=-1)
        for stale in finished[:-n_kept] + [f for f in broken if f.step < newest]:
            with warning(stale.path):
                mark_unfinished(stale.path)  # a half-removed step must not look complete
                self.start()
                self.queue.put(stale.path)

    def _may_remove(self, folder: StepFolder) -> bool:
        path = storage.resolved(folder.path)
        is_kept = storage.is_file(storage.join(path, KEPT_MARKER))
        if path in self.given or is_kept or os.path.islink(folder.path):
            return False
        if path in self.written:
            return True
        if os.path.dirname(path) not in self._configured_folders:
            return False
        # A step that another tool wrote has files, but neither marker nor hashes.
        names = storage.names_in(path)
        return not names or not {*HASHES_FILES, UNFINISHED_MARKER}.isdisjoint(names)

    def start(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.queue = queue.Queue()
            self.thread = threading.Thread(target=purge_thread, args=(self.queue,), daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Wait until the queued steps are removed, and release the lock."""
        if self.thread is not None and self.thread.is_alive():
            self.queue.put(Terminate())
            self.thread.join()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
