"""Writes step folders, synchronously or asynchronously."""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import HashingWriter, newest_finished_step, remove_failed_save
from torchtitan.distributed.processes.late_ranks import BACKGROUND
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import RunError
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import run_beside


class AsyncMode(StrEnum):
    """The values of the setting `checkpoint.async_mode`."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class HostCopies:
    """Copies states into host memory that later saves reuse. Fresh memory takes five times as long."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] | None = None
        self._layout: Any = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the states with copies of their tensors. The next call overwrites the copies."""
        leaves, structure = torch_parts.pytree.tree_flatten(state_dict)
        kinds = [
            torch.is_tensor(x) and (x.shape, x.dtype, getattr(x, "placements", None))
            for x in leaves
        ]
        if self._layout != (layout := (structure, kinds)):
            self._kept = None  # free the old copies before allocating new ones
            self._kept, self._layout = torch_parts.allocate_states(state_dict), layout
        return torch_parts.copy_states(state_dict, self._kept, type_check=False)


# Creates torch's stager. `torchtitan.components.checkpoint` replaces this function.
make_stager: Callable[[StagingOptions], Any] = DefaultStager


class Saver:
    """Writes one checkpoint at a time, and owns the memory, threads and process group for saves.

    future, folder: the background save's future and folder; None if no save is running.
    staging: True while live tensors are copied to pinned memory. staging_future: the future of the copies.
    stager: torch's stager for pinned memory. host_copies: the copies of `AsyncMode.ASYNC`.
    address_of: cache folder -> the address that its files are uploaded to; messages name the address.
    group: the process group of background saves, separate from the groups of training.
    """

    def __init__(self) -> None:
        self.future: Future | None = None
        self.folder: str | None = None
        self.staging = False
        self.staging_future: Future | None = None
        self.stager: Any = None
        self.host_copies = HostCopies()
        self.address_of: dict[str, str] = {}
        self.group: dist.ProcessGroup | None = None

    def save(
        self, states: dict[str, Any], folder: str, mode: AsyncMode, record: dict[str, Any]
    ) -> Future | AsyncSaveResponse | None:
        """Write `states` to `folder`; return DCP's future in an asynchronous mode. Collective."""
        copies = self.host_copies.stage if mode == AsyncMode.ASYNC else None
        arguments: dict[str, Any] = {
            "checkpoint_id": folder,
            "storage_writer": HashingWriter(folder, record, copies),
        }
        if mode == AsyncMode.DISABLED:
            dcp.save(states, **arguments)
            return None
        if mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            order_staging_after_compute(self.stager)
            arguments["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            arguments["async_stager"] = self.stager
        return dcp.async_save(states, process_group=self.group, **arguments)

    def prepare(self, mode: AsyncMode) -> AsyncMode:
        """Set up background saves; return `mode`, or ASYNC if memory cannot be pinned. Collective."""
        if self.stager is not None and torch.__version__ < "2.13":
            # torch before 2.13 closes a stager after its first use (`DefaultStager._stage`).
            self.stager.close()
            self.stager = None
        if mode == AsyncMode.ASYNC_WITH_PINNED_MEM and self.stager is None:
            try:
                self.stager = make_stager(StagingOptions(True, True, True, True))
            except AssertionError as error:  # torch's error if there is no accelerator
                mode = AsyncMode.ASYNC
                logger.warning(
                    "checkpoint.async_mode is async_with_pinned_mem, but memory cannot be pinned "
                    f'here ({error}); using "async" instead'
                )
        if self.group is None and dist.is_initialized():
            # An upload may take hours. A lost rank is noticed at once, because its connections close.
            self.group = dist.new_group(
                backend="gloo", timeout=timedelta(hours=12), group_desc=BACKGROUND
            )
        return mode

    def follow(
        self,
        result: Future | AsyncSaveResponse | None,
        folder: str,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Keep the future of a background save; log when the files are written.

        result: what `save` returned; None if already written. then: called afterwards, in a thread.
        """
        self.folder, name, start = folder, self.name_of(folder), time.monotonic()
        if isinstance(result, AsyncSaveResponse):
            self.staging, self.staging_future = True, result.staging_completion
            result = result.upload_completion
        if then is not None:
            save = result

            def finish() -> None:
                if save is not None:
                    save.result()
                then()

            result = run_beside(finish)
        self.future = result

        def report(future: Future) -> None:
            if not future.cancelled() and future.exception() is None:  # `wait` raises the error
                seconds = time.monotonic() - start
                logger.info(
                    f"{name} was written in the background in {seconds:.2f} s",
                    extra=event("background save", seconds=seconds, path=name),
                )

        if isinstance(result, Future):  # not a Future in the tests of torchtitan 0.2.x
            result.add_done_callback(report)

    def wait_for_staging(self) -> None:
        """Wait on the host until the pinned copies are complete."""
        # A device-side wait is impossible: the stager reports only after its last copy has finished.
        if self.staging:
            self.staging_future.result()
            self.staging = False

    def wait(self, run_folder: str) -> bool:
        """Wait for the background save; False if none is running. Raises RunError if it failed."""
        if self.future is None:
            return False
        future, folder = self.future, self.folder
        self.future = self.folder = None
        what = f"The asynchronous save to {self.name_of(folder)} failed"
        with self.one_error(what, folder, run_folder):
            future.result()
        return True

    def name_of(self, folder: str) -> str:
        return self.address_of.get(folder, folder)

    @contextmanager
    def one_error(self, what: str, folder: str, run_folder: str) -> Iterator[None]:
        """Raise a failure of the block as one RunError, which names the newest step in `run_folder`.

        Removes the unfinished files in `folder`, which may fill the disk; removes a cache folder entirely.
        """

        def advice() -> str:
            step = newest_finished_step(run_folder)
            newest = f": the last whole checkpoint in {run_folder} is that of step {step}"
            if step < 0:
                newest = f"; {run_folder} holds no whole checkpoint yet"
            return f". Fix this and start again{newest}"

        try:
            with dcp.one_error(what, advice):
                yield
        except Exception as error:
            if folder in self.address_of:
                shutil.rmtree(folder, ignore_errors=True)
            elif isinstance(error, RunError) and is_rank_zero():
                with suppress(OSError):
                    remove_failed_save(folder)
            raise

    def close(self) -> None:
        """Free memory, threads and process group. The next save creates them again."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        self.host_copies = HostCopies()
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # already destroyed with the default group
                dist.destroy_process_group(group)


def order_staging_after_compute(stager: Any) -> None:
    """Make the stager's stream wait for the work queued on the current stream."""
    if not torch.accelerator.is_available():
        return
    compute = torch.accelerator.current_stream()
    # torch's stager copies on this private stream, which is not ordered after the compute stream.
    stream = torch_parts.field_of(stager, "staging_stream")
    if stream is None:  # this version of torch has no such attribute
        compute.synchronize()
    else:
        stream.wait_stream(compute)


def is_rank_zero() -> bool:
    try:
        return dist.get_rank() == 0
    except ValueError:  # a single process has no process group
        return True
