"""How a save is copied and written: at once, or in the background while training goes on."""

import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import HashingWriter, newest_finished_step
from torchtitan.checkpoint.hf import save_to_hf
from torchtitan.checkpoint.host_copies import HostCopies
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

States = dict[str, Any]


class AsyncMode(StrEnum):
    """How long training waits for a save (see `checkpoint.async_mode`)."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class Saver:
    """Writes states to folders, one save at a time. Every method but `close` is collective.

    run_folder: the error of a failed save says what is left there to continue from.

    save_future: ends when the save in the background is written; None without one.
    staging_future, staging: whether pinned copies are still being made of the live tensors.
    """

    def __init__(self, run_folder: str, mode: AsyncMode) -> None:
        self.run_folder = run_folder
        self.mode = mode
        self.save_future: Future | None = None
        self.saving_to: str | None = None  # the folder that `save_future` is about
        self.staging_future: Future | None = None
        self.staging = False
        self.stager: Any = None
        self.copies = HostCopies()  # of asynchronous saves without pinned memory
        self.group: dist.ProcessGroup | None = None  # of asynchronous saves
        self._plans = dcp.SavePlans()

    def write(
        self,
        states: States,
        folder: str,
        mode: AsyncMode,
        record: dict[str, Any],
        adapter: BaseStateDictAdapter | None = None,
    ) -> Future | AsyncSaveResponse | None:
        """Write to `folder`, in Hugging Face format with an adapter.

        record: see `HashingWriter`. Returns what DCP does for an asynchronous save.
        """
        with self.explaining_failure(f"The checkpoint {folder} could not be written"):
            if adapter is not None:
                return save_to_hf(states, adapter, folder)
            copies = self.copies if mode == AsyncMode.ASYNC else None
            arguments = self._plans.arguments() | {
                "storage_writer": HashingWriter(folder, record, copies),
                "checkpoint_id": folder,
            }
            if mode == AsyncMode.DISABLED:
                dcp.save(states, **arguments)
                return None
            if mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                arguments["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
                arguments["async_stager"] = self.stager
            return dcp.async_save(states, process_group=self.group, **arguments)

    def start(self, make_states: Callable[[], States], folder: str, record: dict[str, Any]) -> None:
        """Begin an asynchronous save to `folder`."""
        GarbageCollection.collect("before saving a checkpoint")
        if self.mode == AsyncMode.ASYNC_WITH_PINNED_MEM and self.stager is None:
            self._make_stager()
        self._join_group()
        # Made here and not in DCP: what the device still has to do for them is waited for.
        states = make_states()
        is_pinned = self.mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        if is_pinned:
            self._order_staging_after_compute()
        result = self.write(states, folder, self.mode, record)
        GarbageCollection.collect("after saving a checkpoint")
        self.saving_to = folder
        if is_pinned:
            assert isinstance(result, AsyncSaveResponse)
            self.save_future = result.upload_completion
            self.staging_future = result.staging_completion
            self.staging = True
        else:
            self.save_future = result
        start = time.monotonic()

        def report(future: Future) -> None:
            """What went wrong is raised where the save is waited for."""
            if not future.cancelled() and future.exception() is None:
                seconds = time.monotonic() - start
                logger.info(
                    f"{folder} was written in the background in {seconds:.2f} s",
                    extra=event("background save", seconds=seconds, path=folder),
                )

        if isinstance(self.save_future, Future):  # what stands in for DCP may return less
            self.save_future.add_done_callback(report)

    def prepare(self, make_states: Callable[[], States]) -> None:
        """Do now what the first save without pinned memory would take longer for than others."""
        if self.mode == AsyncMode.ASYNC and not self.copies.is_prepared:
            self._join_group()
            self.copies.prepare(make_states())

    def wait(self) -> bool:
        """Wait for the save in the background; False if there is none. RunError if it failed."""
        if self.save_future is None:
            return False
        future, path = self.save_future, self.saving_to
        self.save_future = self.saving_to = None
        with self.explaining_failure(f"The asynchronous save to {path} failed"):
            future.result()
        return True

    def wait_for_staging(self) -> None:
        """Wait until pinned copies are made: the optimizer may change the weights then.

        The host waits, for the stager says no earlier than at the end of its copies that all of
        them are queued, and only then could the device wait in its place. It costs little: the
        copies run beside the forward and backward that are queued already.
        """
        if self.staging:
            self.staging_future.result()
            self.staging = False

    def close(self) -> None:
        """End the helpers and give the memory back. The next save starts them again."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        self.copies.close()
        self.copies = HostCopies()
        self._plans.forget()
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # it went with an earlier default group
                dist.destroy_process_group(group)

    @contextmanager
    def explaining_failure(self, what: str) -> Iterator[None]:
        """Make one RunError, the same on all ranks, of what fails inside; it says what is left."""

        def advice() -> str:
            step = newest_finished_step(self.run_folder)
            if step < 0:
                left = f"; {self.run_folder} holds no whole checkpoint yet"
            else:
                left = f": the last whole checkpoint in {self.run_folder} is that of step {step}"
            return f". Mend that and start again{left}"

        try:
            with dcp.one_error(what, advice):
                yield
        except BaseException:
            # All ranks get the error, but only some of them may remember a plan.
            self._plans.forget()
            raise

    def _join_group(self) -> None:
        """Saves in the background must not share a group with the training's own collectives."""
        if self.group is None and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")

    def _make_stager(self) -> None:
        # From the reference's path, where its tests put a stand-in.
        reference = importlib.import_module("torchtitan.components.checkpoint")
        try:
            self.stager = reference.DefaultStager(StagingOptions(True, True, True, True))
        except AssertionError as error:  # torch says so when there is no accelerator
            logger.warning(
                "checkpoint.async_mode is async_with_pinned_mem, but memory cannot be pinned "
                f'here ({error}); saving as with "async"'
            )
            self.mode = AsyncMode.ASYNC

    def _order_staging_after_compute(self) -> None:
        """Have the device finish what is queued before the stager copies, on its own stream."""
        if not torch.accelerator.is_available():
            return
        compute = torch.accelerator.current_stream()
        staging = getattr(self.stager, "_staging_stream", None)
        if staging is None:  # a torch whose stager keeps its stream elsewhere
            compute.synchronize()
        else:
            staging.wait_stream(compute)
