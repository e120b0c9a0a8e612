"""Removes old step folders."""

import os
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from torchtitan.checkpoint.dcp import one_error
from torchtitan.checkpoint.folder import (
    GIB,
    HASHES_FILE,
    KEPT_MARKER,
    UNFINISHED_MARKER,
    Contents,
    StepFolder,
    contents_of,
    list_steps,
    mark_unfinished,
    remove_folder,
)
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger


class Terminate:
    """An item of the purge queue that ends the thread."""


class SaveDone:
    """In 0.2.x the end of a save in another process. Unused here."""


@contextmanager
def _warning(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a later save tries it again
        logger.warning(f"The old checkpoint {path} could not be removed: {error}")


def purge_thread(purge_queue: queue.Queue) -> None:
    """Remove each folder that is put into the queue, until a `Terminate` arrives."""
    while not isinstance(path := purge_queue.get(), Terminate):
        logger.info(f"Removing old checkpoint {path}")
        with _warning(path):
            remove_folder(path)


class Retention:
    """Removes old steps in a thread.

    configured_folder: here steps of earlier processes may be removed, elsewhere only `written` ones.
    written, given, damaged: resolved paths of the steps that this manager wrote under a name of its
        own, that a caller named for a save or load, and that a load found damaged.
    """

    def __init__(self, configured_folder: str) -> None:
        self._configured_folder = configured_folder
        self.written: set[str] = set()
        self.given: set[str] = set()
        self.damaged: set[str] = set()
        self._lock: FolderLock | None = None
        self.thread: threading.Thread | None = None
        self.queue: queue.Queue = queue.Queue()

    def claim(self, folder: str, n_kept: int, model_parts: list[nn.Module]) -> None:
        """Lock `folder` until `close`, and warn if there is little free space. Collective.

        Raises RunError if another job writes there.
        """
        if self._lock is not None:
            return

        def lock() -> None:
            self._lock = FolderLock(folder)

        with one_error(f"The checkpoint folder {folder} cannot be used"):
            from_rank_zero(lock)
        n_bytes = estimated_bytes(model_parts)
        if self._lock is not None:  # rank 0
            warn_of_little_space(folder, n_bytes, n_kept)

    def leave_alone(self, path: str) -> None:
        """Never remove the folder `path`, which a caller named, in this process."""
        self.given.add(os.path.realpath(path))

    def will_write(self, folder: str, warns: bool) -> None:
        """Record that this manager writes `folder`. warns: of what the folder holds already."""
        path = os.path.realpath(folder)
        if warns and path not in self.written and os.path.isdir(folder) and os.listdir(folder):
            contents = contents_of(folder)
            if contents == Contents.UNKNOWN:
                logger.warning(f"Saving in {folder}, which holds other files; they stay")
            elif contents != Contents.UNFINISHED:
                logger.warning(f"Replacing the checkpoint {folder}")
        self.written.add(path)
        self.damaged.discard(path)

    def purge(self, folder: str, n_kept: int, saving_to: str | None) -> None:
        """Queue the removal of all but the newest `n_kept` finished steps in `folder`.

        saving_to: the step that is being written. It is neither counted nor removed, and neither
        are steps that this run doesn't own. Interrupted and damaged steps are not counted, and go
        once a newer step is finished.
        """
        folders = [f for f in list_steps(folder) if f.path != saving_to and self._may_remove(f)]
        broken = [
            f
            for f in folders
            if f.contents in (Contents.UNFINISHED, Contents.DAMAGED)
            or os.path.realpath(f.path) in self.damaged
        ]
        # After a resume from an older step, this process's steps are newer than higher numbers.
        finished = sorted(
            (f for f in folders if f not in broken),
            key=lambda f: (os.path.realpath(f.path) in self.written, f.step),
        )
        newest = max((f.step for f in finished), default=-1)
        for stale in finished[:-n_kept] + [f for f in broken if f.step < newest]:
            with _warning(stale.path):
                mark_unfinished(stale.path)  # a half-removed step must not look whole
                self.start()
                self.queue.put(stale.path)

    def _may_remove(self, folder: StepFolder) -> bool:
        path = os.path.realpath(folder.path)
        is_kept = os.path.isfile(os.path.join(path, KEPT_MARKER))
        if path in self.given or is_kept or os.path.islink(folder.path):
            return False
        if path in self.written:
            return True
        if os.path.dirname(path) != os.path.realpath(self._configured_folder):
            return False
        # A step that another tool wrote has files, but neither marker nor hashes.
        names = os.listdir(path)
        return not names or UNFINISHED_MARKER in names or HASHES_FILE in names

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


def estimated_bytes(model_parts: list[nn.Module]) -> int:
    """Bytes of all ranks' weights, and two moments for each trained weight. Collective."""
    parameters = [pair for part in model_parts for pair in part.named_parameters()]
    n_bytes = sum((3 if p.requires_grad else 1) * p.nbytes for _, p in parameters)
    first_name = parameters[0][0] if parameters else ""
    # A DTensor's nbytes is global, so only pipeline ranks, with other first names, are added up.
    return sum(dict(all_ranks((first_name, n_bytes))).values())


def warn_of_little_space(folder: str, n_bytes: int, keep_latest_k: int) -> None:
    """n_bytes: size of one checkpoint. keep_latest_k: 0 keeps all; then room for one is checked."""
    n_more = 1
    if keep_latest_k:
        n_whole = sum(step.is_finished for step in list_steps(folder))
        n_more = max(1, keep_latest_k + 1 - n_whole)  # an old step goes after a new one
    free = shutil.disk_usage(folder).free
    if free < n_more * n_bytes:
        logger.warning(
            f"{folder} has {free / GIB:.3f} GiB free; a checkpoint of this run takes about "
            f"{n_bytes / GIB:.3f} GiB, and up to {n_more} more of them are kept at a time. Make "
            "room, or lower checkpoint.keep_latest_k"
        )
