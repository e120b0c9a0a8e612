"""Which step folders are kept, and how the others are removed."""

import os
import queue
import shutil
import threading

import torch.nn as nn

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
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.tools.logging import logger


class Terminate:
    """Put into the purge queue to end its thread."""


class SaveDone:
    """Says that a save in another process has ended."""


def purge_thread(purge_queue: queue.Queue) -> None:
    """Remove each folder that comes out of the queue, until a `Terminate` does."""
    while not isinstance(path := purge_queue.get(), Terminate):
        logger.info(f"Removing old checkpoint {path}")
        try:
            remove_folder(path)
        except OSError as error:
            _warn_of_what_stays(path, error)


def _warn_of_what_stays(path: str, error: OSError) -> None:  # tried again after a later save
    logger.warning(f"The old checkpoint {path} could not be removed: {error}")


class Retention:
    """Removes old steps in a thread.

    configured_folder: earlier processes of the run have written here, too. In a folder that was
        set at run time, only what this manager wrote may be removed.

    The sets hold resolved paths: `written` by this manager under a name that it chose, `given` by
    a caller to save to or load from, `damaged` as a load found out.
    """

    def __init__(self, configured_folder: str) -> None:
        self._configured_folder = configured_folder
        self.written: set[str] = set()
        self.given: set[str] = set()
        self.damaged: set[str] = set()
        self.thread: threading.Thread | None = None
        self.queue: queue.Queue = queue.Queue()

    def will_write(self, folder: str, warns: bool) -> None:
        """Note that `folder` is this manager's.

        warns: of a checkpoint, or other files, that were there before.
        """
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
        """Have all but the newest finished step folders in `folder` removed.

        `saving_to`, which is being written, neither counts nor goes; nor do folders that are not
        this run's. An interrupted or damaged one does not count, and goes once a newer step is
        finished.
        """
        folders = [f for f in list_steps(folder) if f.path != saving_to and self._may_remove(f)]
        broken = [
            f
            for f in folders
            if f.contents in (Contents.UNFINISHED, Contents.DAMAGED)
            or os.path.realpath(f.path) in self.damaged
        ]
        # After a resume from an older step, what this process saved is newer than higher numbers.
        finished = sorted(
            (f for f in folders if f not in broken),
            key=lambda f: (os.path.realpath(f.path) in self.written, f.step),
        )
        if not finished:
            return
        newest = max(f.step for f in finished)
        for stale in finished[:-n_kept] + [f for f in broken if f.step < newest]:
            try:
                mark_unfinished(stale.path)  # half removed, it must not look whole
            except OSError as error:
                _warn_of_what_stays(stale.path, error)
                continue
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
        # Other tools leave neither marker nor hashes, but something.
        names = os.listdir(path)
        return not names or UNFINISHED_MARKER in names or HASHES_FILE in names

    def start(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.queue = queue.Queue()
            self.thread = threading.Thread(target=purge_thread, args=(self.queue,), daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Wait until what is queued has been removed."""
        if self.thread is not None and self.thread.is_alive():
            self.queue.put(Terminate())
            self.thread.join()


def estimated_bytes(model_parts: list[nn.Module]) -> int:
    """Of a checkpoint of all ranks: the weights, and two moments for each that is trained.
    Collective."""
    parameters = [pair for part in model_parts for pair in part.named_parameters()]
    n_bytes = sum((3 if p.requires_grad else 1) * p.nbytes for _, p in parameters)
    first_name = parameters[0][0] if parameters else ""
    # Sizes are global; only pipeline ranks have different parameters.
    return sum(dict(all_ranks((first_name, n_bytes))).values())


def warn_of_little_space(folder: str, n_bytes: int, keep_latest_k: int) -> None:
    """n_bytes: of one checkpoint. keep_latest_k: 0 keeps all, of which one at least needs room."""
    n_more = 1
    if keep_latest_k:
        n_whole = sum(step.is_finished for step in list_steps(folder))
        n_more = max(1, keep_latest_k + 1 - n_whole)  # old ones go after a new one is whole
    free = shutil.disk_usage(folder).free
    if free < n_more * n_bytes:
        logger.warning(
            f"{folder} has {free / GIB:.3f} GiB free; a checkpoint of this run has about "
            f"{n_bytes / GIB:.3f} GiB, and up to {n_more} more of them are kept at a time. Make "
            "room, or lower checkpoint.keep_latest_k"
        )
