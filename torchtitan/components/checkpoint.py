"""Saving and loading a run: model, optimizer, schedulers, data position and step.

Everything is written and read by torch's distributed checkpoint (DCP), so that a run may
continue on another number of ranks. `checkpoint_folder.py` says when a step folder is whole,
`checkpoint_contents.py` compares what it holds with what the model wants.
Model entries stand at the top level of a checkpoint under their parameter names; the other
components under `optimizer`, `lr_scheduler`, `dataloader`, `train_state`.
"""

import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components import dcp
from torchtitan.components.checkpoint_contents import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    check_no_key_missing,
    check_same_model,
    flat_keys,
    keys_of,
    keys_outside_model,
    one_error,
    saved_shapes_in,
    shapes_of,
)
from torchtitan.components.checkpoint_folder import (
    GIB,
    Contents,
    HashingWriter,
    StepFolder,
    all_ranks,
    contents_of,
    find_damage,
    from_rank_zero,
    is_kept,
    is_of_this_package,
    list_steps,
    mark_kept,
    mark_unfinished,
    remove_folder,
)
from torchtitan.components.checkpoint_hf import load_from_hf, save_to_hf
from torchtitan.components.checkpoint_plan import SavePlans
from torchtitan.components.host_copies import HostCopies
from torchtitan.components.run_record import (
    check_same_optimizer,
    differences,
    read_record,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.config.checks.values import checkpoint_settings, hf_conversion
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.events import event
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

if TYPE_CHECKING:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.ft import FTManager
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = [
    "DATALOADER",
    "LR_SCHEDULER",
    "MODEL",
    "OPTIMIZER",
    "TRAIN_STATE",
    "AsyncMode",
    "CheckpointManager",
    "HuggingFaceStorageWriter",
    "ModelWrapper",
    "SaveDone",
    "Terminate",
    "purge_thread",
]

# Entries of the train state that older checkpoints, and the reference's, have not.
_KEYS_SINCE_FIRST_VERSION = {"weights_version"}

_WEIGHTS_ONLY = (
    "the optimizer, step and data position start from zero. To continue from an earlier full "
    "checkpoint, name its step in checkpoint.load_step"
)


class AsyncMode(StrEnum):
    """How long training waits for a save (see `checkpoint.async_mode`)."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


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
        except OSError as error:  # tried again after a later save
            logger.warning(f"The old checkpoint {path} could not be removed: {error}")


class ModelWrapper(Stateful):
    """The parameters and persistent buffers of all model parts, as one state dict.

    `state_dict()` hands out a cached dict whose tensors are the live parameters, not copies.
    Call `refresh()` when parameters may have been replaced or moved since.
    """

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.refresh()

    def _get_state_dict(self) -> dict[str, Any]:
        return {
            name: tensor
            for part in self.model
            for name, tensor in get_model_state_dict(part).items()
        }

    def release(self) -> None:
        """Let go of the tensors until they are asked for, so that their memory can be freed."""
        self.cache_state_dict = None

    def refresh(self) -> None:
        self.cache_state_dict: dict[str, Any] | None = self._get_state_dict()

    def state_dict(self) -> dict[str, Any]:
        if self.cache_state_dict is None:
            self.refresh()
        return self.cache_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Entries that a part does not have are passed over: they belong to another part."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))
        self.refresh()


class _Source(NamedTuple):
    """Which checkpoint is to be loaded, and what of it."""

    path: str
    model_only: bool
    from_hf: bool = False
    from_quantized: bool = False


class _KnownKeys(Stateful):
    """A component without the entries that a checkpoint of an older version has not."""

    def __init__(self, component: Stateful, keys: Iterable[str]) -> None:
        self.component = component
        self.keys = set(keys)

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.component.state_dict().items() if key in self.keys
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.component.load_state_dict(state_dict)


class _AllPositions(Stateful):
    """Reads the data position of every rank that saved one, for a loader that divides them
    anew; DCP reads only the entries that it is shown beforehand."""

    def __init__(self, dataloader: Stateful, saved_keys: Iterable[str]) -> None:
        self.dataloader = dataloader
        self.placeholders = dict.fromkeys(saved_keys)

    def state_dict(self) -> dict[str, Any]:
        return self.placeholders

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataloader.load_state_dict(state_dict)


class CheckpointManager:
    """Saves and loads the states of a run, as the `[checkpoint]` section says.

    `states` is updated in place with the model, optimizer, schedulers and dataloader. Entries
    need not be `Stateful`. `folder`, `interval`, `keep_latest_k`, `load_only` and `sd_adapter`
    may be set at run time. `model_description` is how error messages call the model.

    Without a dataloader the manager is driven by its caller: each `save` is due.
    With `enable = false` only the folders that calls name by `path` are written and read.
    """

    def __init__(
        self,
        dataloader: "BaseDataLoader | None",
        model_parts: list[nn.Module],
        optimizers: "OptimizersContainer",
        lr_schedulers: "LRSchedulersContainer",
        states: dict[str, Any],
        checkpoint_config: "Checkpoint",
        sd_adapter: "BaseStateDictAdapter | None",
        base_folder: str = "",
        ft_manager: "FTManager | None" = None,
    ) -> None:
        if checkpoint_config.enable:
            refuse(checkpoint_settings(checkpoint_config))
            if sd_adapter is None:
                refuse(hf_conversion(checkpoint_config, "one without state_dict_adapter"))
        if ft_manager is not None and ft_manager.enabled:
            raise NotImplementedError(
                "Checkpoints under torchft are not available; set fault_tolerance.enable = false"
            )
        self.purge_thread: threading.Thread | None = None
        self._plans = SavePlans()
        self.save_future: Future | None = None
        self.stager: Any = None
        self.staging = False
        self.enable = checkpoint_config.enable
        self.load_only = checkpoint_config.load_only
        self.ft_manager = None
        self.enable_ft_dataloader_checkpoints = False
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self.async_mode = AsyncMode(checkpoint_config.async_mode.lower())
        self.enable_staging = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM

        self.folder = self._configured_folder = os.path.join(base_folder, checkpoint_config.folder)
        self.sd_adapter = sd_adapter
        self.model_description = " + ".join(type(part).__name__ for part in model_parts)
        self.initial_load_path = checkpoint_config.initial_load_path
        self.initial_load_model_only = checkpoint_config.initial_load_model_only
        self.initial_load_in_hf = checkpoint_config.initial_load_in_hf
        self.initial_load_in_hf_quantized = checkpoint_config.initial_load_in_hf_quantized
        self.last_save_model_only = checkpoint_config.last_save_model_only
        self.last_save_in_hf = checkpoint_config.last_save_in_hf
        self.export_dtype = TORCH_DTYPE_MAP[checkpoint_config.export_dtype]
        self.exclude_from_loading = checkpoint_config.exclude_from_loading
        self.interval = checkpoint_config.interval
        self.enable_first_step_checkpoint = checkpoint_config.enable_first_step_checkpoint
        self.verify_on_load = checkpoint_config.verify_on_load

        self.staging_future: Future | None = None
        self._saving_to: str | None = None  # the folder an asynchronous save is writing
        self.pg: dist.ProcessGroup | None = None  # of asynchronous saves

        self.keep_latest_k = checkpoint_config.keep_latest_k
        self._copies = HostCopies()  # of asynchronous saves without pinned memory
        self.run_record: dict[str, Any] = {}  # of what a resume compares; see run_record.py
        self._lock: FolderLock | None = None
        self._chosen: tuple[list[StepFolder], StepFolder | None] | None = None
        self._damaged: set[str] = set()
        self._written: set[str] = set()  # by this manager, in a folder of its own choice
        self._given: set[str] = set()  # by path, to be saved to or loaded from
        if self.initial_load_path:
            self._given.add(_resolved(self.initial_load_path))
        if self.enable:
            if self.keep_latest_k > 0:
                self._start_purge_thread()
            logger.info(f"Checkpointing is on, in {self.folder}")

    def __del__(self) -> None:
        # Daemon threads are frozen while the interpreter ends; joining one would never return.
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Wait for a running save, and end the helper threads. May be called twice.

        Raises RuntimeError if that save failed.
        """
        if not hasattr(self, "save_future"):  # the constructor has refused its arguments
            return
        try:
            if self._async_wait():
                self._purge_stale_checkpoints()
        finally:
            if self.purge_thread is not None and self.purge_thread.is_alive():
                self.purge_queue.put(Terminate())
                self.purge_thread.join()
            if self.stager is not None:
                self.stager.close()
                self.stager = None
            self._copies.close()
            self._copies = HostCopies()  # gives the memory back
            self._plans.forget()
            self._leave_group()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _leave_group(self) -> None:
        group, self.pg = self.pg, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # it went with an earlier default group
                dist.destroy_process_group(group)

    # Saving

    @torch.no_grad()
    def save(
        self,
        curr_step: int,
        last_step: bool = False,
        *,
        path: str | None = None,
        force: bool = False,
    ) -> None:
        """Save if this step is due. Collective.

        Due are the last step, every `interval` steps, and step 1 when
        `enable_first_step_checkpoint`; without a dataloader, every step.
        force: the step is due.
        path: the step folder to write in place of `<folder>/step-<curr_step>`; the step is due
            then. Retention, of this run and later ones, leaves the folder alone.

        Raises ValueError where a save was asked for by path or force that the config forbids,
        RunError (a RuntimeError) if this save, or an asynchronous one before it, fails; older
        checkpoints are then untouched.
        """
        if path is not None or force:
            self._check_may_save(path)
        elif not self._should_save(curr_step, last_step):
            self._prepare_async_save()
            return
        self._async_wait()
        start = time.monotonic()
        self._refresh_model()
        folder = self._create_checkpoint_id(curr_step) if path is None else os.fspath(path)
        if path is None:
            if _rank() == 0 and _resolved(folder) not in self._written:
                _warn_of_replacing(folder)
            self._written.add(_resolved(folder))
            self._damaged.discard(folder)
        else:
            self._given.add(_resolved(folder))
            with self._explaining_failure(f"The checkpoint {folder} could not be written"):
                from_rank_zero(lambda: mark_kept(folder))
        if last_step:
            self._save_last_step(folder)
        elif self.async_mode == AsyncMode.DISABLED:
            states = self._flattened_model_states_sd()
            self.dcp_save(states, folder, AsyncMode.DISABLED, enable_garbage_collection=True)
        else:
            self._save_async(folder)
        seconds = time.monotonic() - start
        logger.info(
            f"Training waited {seconds:.2f} s for step {curr_step}'s save",
            extra=event(
                "save", curr_step, seconds=seconds, in_background=self.save_future is not None
            ),
        )
        self._purge_stale_checkpoints()

    def maybe_wait_for_staging(self) -> None:
        """Call before the optimizer changes the weights: a pinned save may still be copying.

        The host waits, for the stager says no earlier than at the end of its copies that all of
        them are queued, and only then could the device wait in its place. It costs little: the
        copies run beside the forward and backward that are queued already.
        """
        if self.enable_staging and self.staging:
            self.staging_future.result()
            self.staging = False

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """Write `state_dict` to the folder `checkpoint_id`, in HF format when `to_hf`."""
        with self._explaining_failure(f"The checkpoint {checkpoint_id} could not be written"):
            if to_hf:
                save_to_hf(state_dict, self.require_adapter(), checkpoint_id)
                return None
            copies = self._copies if async_mode == AsyncMode.ASYNC else None
            writer = HashingWriter(checkpoint_id, self.run_record, copies)
            if async_mode == AsyncMode.DISABLED:
                dcp.save(
                    state_dict,
                    storage_writer=writer,
                    checkpoint_id=checkpoint_id,
                    **self._plans.arguments(),
                )
                result = None
            else:
                pinned: dict[str, Any] = {}
                if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                    pinned = {
                        "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                        "async_stager": self.stager,
                    }
                result = dcp.async_save(
                    state_dict,
                    storage_writer=writer,
                    checkpoint_id=checkpoint_id,
                    process_group=self.pg,
                    **pinned,
                    **self._plans.arguments(),
                )
        if enable_garbage_collection:
            GarbageCollection.collect("after saving a checkpoint")
        return result

    def _should_save(self, curr_step: int, last_step: bool) -> bool:
        if not self.enable or self.load_only:
            return False
        if self.states[DATALOADER] is None:
            return True
        is_wanted_first_step = curr_step == 1 and self.enable_first_step_checkpoint
        return last_step or is_wanted_first_step or curr_step % self.interval == 0

    def saves_where(self, other: "CheckpointManager") -> bool:
        """Whether both write step folders, and side by side."""
        both = (self, other)
        return self is not other and (
            all(manager.enable and not manager.load_only for manager in both)
            and _resolved(self.folder) == _resolved(other.folder)
        )

    def _check_may_save(self, path: str | None) -> None:
        if self.load_only:
            raise ValueError(
                "checkpoint.load_only = true forbids to save; set it to false, or "
                "checkpointer.load_only = False for the time of this save"
            )
        if path is None and not self.enable:
            raise ValueError(
                "checkpoint.enable = false leaves no folder to save in; give the step folder as "
                "path, or set checkpoint.enable = true"
            )

    def _save_last_step(self, path: str) -> None:
        """Synchronous whatever the mode: the process is about to end."""
        states = self._flattened_model_states_sd()
        if self.last_save_model_only:
            states = {
                name: tensor.to(self.export_dtype) if tensor.is_floating_point() else tensor
                for name, tensor in self.states[MODEL].state_dict().items()
            }
        self.dcp_save(
            states,
            path,
            AsyncMode.DISABLED,
            enable_garbage_collection=True,
            to_hf=self.last_save_in_hf,
        )

    def _save_async(self, path: str) -> None:
        GarbageCollection.collect("before saving a checkpoint")
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM and self.stager is None:
            self._make_stager()
        self._join_group()
        # Made here and not in DCP: what the device still has to do for them is waited for.
        states = self._states_now()
        if self.enable_staging:
            self._order_staging_after_compute()
        result = self.dcp_save(states, path, self.async_mode, enable_garbage_collection=True)
        self._saving_to = path
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            assert isinstance(result, AsyncSaveResponse)
            self.save_future = result.upload_completion
            self.staging_future = result.staging_completion
            self.staging = True
        else:
            self.save_future = result
        if isinstance(self.save_future, Future):  # what stands in for DCP may return less
            start = time.monotonic()
            self.save_future.add_done_callback(lambda future: _report_written(future, path, start))

    def _prepare_async_save(self) -> None:
        """Before the first save is due, do what it would take longer for than later ones."""
        is_wanted = self.enable and not self.load_only and self.async_mode == AsyncMode.ASYNC
        if is_wanted and not self._copies.is_prepared:
            self._join_group()
            self._refresh_model()
            self._copies.prepare(self._states_now())

    def _join_group(self) -> None:
        """Saves in the background must not share a group with the training's own collectives."""
        if self.pg is None and dist.is_initialized():
            self.pg = dist.new_group(backend="gloo")

    def _states_now(self) -> dict[str, Any]:
        """What a full checkpoint holds, with the live tensors."""
        return {
            name: state.state_dict() if isinstance(state, Stateful) else state
            for name, state in self._flattened_model_states_sd().items()
        }

    def _make_stager(self) -> None:
        try:
            self.stager = DefaultStager(StagingOptions(True, True, True, True))
        except AssertionError as error:  # torch says so when there is no accelerator
            logger.warning(
                "checkpoint.async_mode is async_with_pinned_mem, but memory cannot be pinned "
                f'here ({error}); saving as with "async"'
            )
            self.async_mode = AsyncMode.ASYNC
            self.enable_staging = False

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

    def _async_wait(self) -> bool:
        """Wait for the asynchronous save that is running; False if there is none."""
        if self.save_future is None:
            return False
        future, path = self.save_future, self._saving_to
        self.save_future = self._saving_to = None
        with self._explaining_failure(f"The asynchronous save to {path} failed"):
            future.result()
        return True

    @contextmanager
    def _explaining_failure(self, what: str) -> Iterator[None]:
        """The error of a failed save says what is left to continue from."""

        def advice() -> str:
            step = self._find_load_step()
            if step < 0:
                return f". Mend that and start again; {self.folder} holds no whole checkpoint yet"
            return (
                f". Mend that and start again: the last whole checkpoint in {self.folder} is that "
                f"of step {step}"
            )

        with one_error(what, advice), self._plans.forgotten_on_error():
            yield

    def _purge_stale_checkpoints(self) -> None:
        """Have all but the newest `keep_latest_k` finished step folders removed.

        A folder that is being written neither counts nor goes; an interrupted one, or one that
        was found damaged, does not count, and goes once a newer step is finished. Folders that
        are not ours to remove neither count nor go.
        """
        if not (self.enable and self.keep_latest_k > 0 and _rank() == 0):
            return
        folders = [folder for folder in list_steps(self.folder) if self._may_purge(folder)]
        broken = [
            f
            for f in folders
            if f.contents in (Contents.UNFINISHED, Contents.DAMAGED) or f.path in self._damaged
        ]
        # After a resume from an older step, what this process saved is newer than higher numbers.
        finished = sorted(
            (f for f in folders if f not in broken and f.path != self._saving_to),
            key=lambda f: (_resolved(f.path) in self._written, f.step),
        )
        if not finished:
            return
        newest = max(f.step for f in finished)
        stale = finished[: -self.keep_latest_k] + [
            f for f in broken if f.step < newest and f.path != self._saving_to
        ]
        if stale and (self.purge_thread is None or not self.purge_thread.is_alive()):
            self._start_purge_thread()  # keep_latest_k was 0 at first
        for folder in stale:
            mark_unfinished(folder.path)  # half removed, it must not look whole
            self.purge_queue.put(folder.path)

    def _may_purge(self, folder: StepFolder) -> bool:
        """Whether `folder` is a checkpoint of this run, and nobody gave it by path.

        In the configured folder earlier processes of the run have written, too. In one that was
        set at run time, only what this manager wrote is its own.
        """
        path = _resolved(folder.path)
        if path in self._given or is_kept(path) or os.path.islink(folder.path):
            return False
        if path in self._written:
            return True
        is_configured = _resolved(self.folder) == _resolved(self._configured_folder)
        return is_configured and is_of_this_package(path)

    def _start_purge_thread(self) -> None:
        self.purge_queue: queue.Queue = queue.Queue()
        self.purge_thread = threading.Thread(
            target=purge_thread, args=(self.purge_queue,), daemon=True
        )
        self.purge_thread.start()

    # Loading

    @torch.no_grad()
    def load(self, step: int = -1, *, path: str | None = None, model_only: bool = False) -> bool:
        """Load a checkpoint, and return whether there was one. Collective.

        step: the step to load, from this run's own folder; -1 is the newest one that is whole,
            or without any the initial checkpoint, if one is configured.
        path: the step folder to load, DCP or Hugging Face files; nothing else is looked at then,
            neither this run's folder nor the initial checkpoint.
        model_only: leave optimizer, schedule, step and data position as they are.

        Raises FileNotFoundError or ValueError when what was asked for is not there, is damaged,
        or belongs to another model.
        """
        if path is not None and step != -1:
            raise ValueError(f"load() got step {step} and path {path!r}; give one of them")
        if path is None and not self.enable:
            return False
        self._check_excluded_names()
        self._async_wait()
        if path is not None:
            source = self._source_at(os.fspath(path))
        else:
            source = self._own_source(step) or self._initial_source()
        if source is None:
            logger.info(f"No checkpoint to load in {self.folder}: starting from scratch")
            return False
        logger.info(f"Loading the checkpoint {source.path}")
        start = time.monotonic()
        self._refresh_model()
        states = self._states_to_load(source.model_only or model_only)
        if not source.from_hf:
            states = self._fit_to_checkpoint(states, source)
        if OPTIMIZER in states or DATALOADER in states:  # the run goes on, with more than weights
            self._compare_runs(source.path, states)
        self.dcp_load(
            states,
            checkpoint_id=source.path,
            from_hf=source.from_hf,
            from_quantized=source.from_quantized,
        )
        GarbageCollection.collect("after loading a checkpoint")
        logger.info(f"Loaded {source.path} in {time.monotonic() - start:.2f} s")
        return True

    @torch.no_grad()
    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Read `checkpoint_id` into `state_dict` and the model."""
        if from_hf:
            adapter = self.require_adapter()
            loaded = load_from_hf(
                state_dict, adapter, checkpoint_id, from_quantized, self.model_description
            )
            self.states[MODEL].load_state_dict(loaded)
            return
        with one_error(f"The checkpoint {checkpoint_id} could not be read"):
            dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _own_source(self, step: int) -> _Source | None:
        """The checkpoint of this run to load; None if it has none and none was named."""
        folders = from_rank_zero(lambda: list_steps(self.folder))
        if step != -1:
            chosen = self._named_step(step, folders)
        else:
            chosen = self._newest_whole_step(folders)
            if chosen is None:
                return None
        if newer := [str(f.step) for f in folders if f.step > chosen.step]:
            logger.warning(
                f"{self.folder} holds steps after {chosen.step} ({', '.join(newer)}), which this "
                "run replaces as it comes to them"
            )
        if self.initial_load_path or self.initial_load_in_hf:
            logger.warning(
                f"{chosen.path} continues this run; checkpoint.initial_load_path and "
                "initial_load_in_hf are ignored. Use another checkpoint.folder to start anew"
            )
        from_hf = chosen.contents == Contents.HF
        if from_hf:
            logger.warning(
                f"{chosen.path} holds weights only, in Hugging Face format: {_WEIGHTS_ONLY}"
            )
        return _Source(chosen.path, model_only=from_hf or chosen.step == 0, from_hf=from_hf)

    def _named_step(self, step: int, folders: list[StepFolder]) -> StepFolder:
        for folder in folders:
            if folder.step == step:
                self._check_undamaged(folder.path)
                return folder
        there = ", ".join(str(f.step) for f in folders) or "none"
        raise FileNotFoundError(
            f"There is no checkpoint of step {step} in {self.folder} (steps there: {there}). "
            "Set checkpoint.load_step to one of them, or to -1 for the newest"
        )

    def _newest_whole_step(self, folders: list[StepFolder]) -> StepFolder | None:
        """Collective. The answer is kept while the folders are the same: hashing takes long."""
        if self._chosen is not None and self._chosen[0] == folders:
            return self._chosen[1]
        chosen, damaged = None, []
        for folder in reversed(folders):
            if folder.contents == Contents.UNFINISHED:
                logger.warning(f"Passing over {folder.path}: its save was interrupted")
            elif folder.contents == Contents.UNKNOWN:
                logger.warning(
                    f"Passing over {folder.path}: it holds no checkpoint, which has a file .metadata"
                )
            elif damage := self._damage_of(folder.path):
                logger.warning(f"Passing over {folder.path}: it is damaged, {damage}")
                damaged.append(folder.path)
            else:
                chosen = folder
                break
        if damaged and chosen is None:
            raise ValueError(
                f"Every checkpoint in {self.folder} is damaged ({', '.join(damaged)}). Move "
                "the folder away to start anew, or set checkpoint.verify_on_load = false"
            )
        self._damaged.update(damaged)
        self._chosen = folders, chosen
        return chosen

    def _damage_of(self, path: str) -> str | None:
        """Collective."""
        is_damaged = from_rank_zero(lambda: contents_of(path)) == Contents.DAMAGED
        return find_damage(path) if self.verify_on_load or is_damaged else None

    def _source_at(self, path: str) -> _Source:
        self._given.add(_resolved(path))
        from_rank_zero(lambda: _check_is_folder(path))
        contents = from_rank_zero(lambda: contents_of(path))
        if contents == Contents.UNKNOWN:
            from_rank_zero(lambda: _check_holds_dcp(path, "load(path=...)"))
        self._check_undamaged(path)
        from_hf = contents == Contents.HF
        if from_hf:
            logger.warning(f"{path} holds weights only, in Hugging Face format: {_WEIGHTS_ONLY}")
        from_quantized = from_hf and self.initial_load_in_hf_quantized
        return _Source(path, from_hf, from_hf, from_quantized)

    def _initial_source(self) -> _Source | None:
        """Where a run without checkpoints of its own starts from, if that is configured."""
        path = self.initial_load_path
        key = "checkpoint.initial_load_path"
        if not path and self.initial_load_in_hf:
            path, key = self.require_adapter().hf_assets_path, "model.hf_assets_path"
            if not path:
                raise ValueError(
                    "checkpoint.initial_load_in_hf needs checkpoint.initial_load_path or "
                    "model.hf_assets_path, a folder with safetensors files; neither is set"
                )
        if not path:
            return None
        if not from_rank_zero(lambda: os.path.isdir(path)):
            raise ValueError(f"{key} must be a folder with a checkpoint, got {path!r}")
        if not self.initial_load_in_hf:
            from_rank_zero(lambda: _check_holds_dcp(path, key))
        self._check_undamaged(path)
        return _Source(
            path,
            self.initial_load_model_only,
            self.initial_load_in_hf,
            self.initial_load_in_hf_quantized,
        )

    def _check_undamaged(self, path: str) -> None:
        """For a checkpoint that was asked for by name: no other can take its place."""
        if from_rank_zero(lambda: contents_of(path)) == Contents.UNFINISHED:
            raise ValueError(f"The checkpoint {path} is incomplete: its save was interrupted")
        if damage := self._damage_of(path):
            raise ValueError(
                f"The checkpoint {path} is damaged: {damage}. Load another one, or set "
                "checkpoint.verify_on_load = false to read it nevertheless"
            )

    def _fit_to_checkpoint(self, states: dict[str, Any], source: _Source) -> dict[str, Any]:
        """The states to hand to DCP for this checkpoint, after comparing the two.

        Raises ValueError, the same on every rank, when the checkpoint lacks something or is
        one of another model.
        """
        saved = from_rank_zero(lambda: saved_shapes_in(source.path))
        if saved is None:
            return states
        model_names = self.states[MODEL].state_dict().keys()
        others = {name: state for name, state in states.items() if name not in model_names}
        own_keys = {name: flat_keys(name, state) for name, state in others.items()}
        saved_others = keys_outside_model(saved, self.states)

        if model_names <= states.keys():
            weights = {name: states[name] for name in model_names}
            saved_weights = {key: saved[key] for key in saved.keys() - saved_others}
            check_same_model(shapes_of(weights), saved_weights, source.path, self.model_description)
        if others and not saved_others:
            logger.warning(f"{source.path} holds weights only: {_WEIGHTS_ONLY}")
            return {name: states[name] for name in model_names if name in states}

        if DATALOADER in others:
            saved_positions = keys_of(DATALOADER, saved)
            own_positions = keys_of(DATALOADER, own_keys[DATALOADER])
            if saved_positions and saved_positions != set().union(*all_ranks(own_positions)):
                positions = _AllPositions(others[DATALOADER], saved_positions)
                states = states | {DATALOADER: positions}
                own_keys[DATALOADER] = set()
        if TRAIN_STATE in others:
            known = keys_of(TRAIN_STATE, saved)
            newer = {f"{TRAIN_STATE}.{key}" for key in _KEYS_SINCE_FIRST_VERSION - known}
            if own_keys[TRAIN_STATE] & newer:
                states = states | {TRAIN_STATE: _KnownKeys(others[TRAIN_STATE], known)}
                own_keys[TRAIN_STATE] -= newer
        for name, keys in own_keys.items():
            check_no_key_missing(name, keys - saved.keys(), source.path)
        return states

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        if model_only:
            return self.states[MODEL].state_dict()
        # An absent dataloader has nothing to restore.
        kept = {
            name: state
            for name, state in self.states.items()
            if name not in self.exclude_from_loading and state is not None
        }
        return self._flattened_model_states_sd(kept)

    def _check_excluded_names(self) -> None:
        for name in self.exclude_from_loading:
            if name not in self.states:
                raise ConfigError(
                    f"checkpoint.exclude_from_loading can hold {', '.join(self.states)}, got "
                    f"{name!r}; correct or remove it"
                )

    def _compare_runs(self, path: str, states: dict[str, Any]) -> None:
        """Say what this run has otherwise than the one that saved. Collective.

        Raises ValueError if the optimizer's state is of another kind of optimizer.
        """
        saved = from_rank_zero(lambda: read_record(path))
        if OPTIMIZER in states:
            check_same_optimizer(saved, self.run_record, path)
        for difference in differences(saved, self.run_record, states):
            logger.warning(f"{path} is continued, but {difference}")

    # Shared

    def release_model(self) -> None:
        """Hold no parameter's memory; each save and load takes hold of it anew."""
        self.states[MODEL].release()

    def _refresh_model(self) -> None:
        """After an evaluation FSDP may hold gathered weights, and a client may have moved them;
        both would make a state dict of the wrong tensors."""
        from torchtitan.distributed.fsdp import reshard_model

        for part in self.states[MODEL].model:
            reshard_model(part)
        self.states[MODEL].refresh()

    def _flattened_model_states_sd(
        self, state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The states with the model's entries at the top level, under their own names."""
        states = dict(self.states if state_dict is None else state_dict)
        model = states.pop(MODEL, None)
        return states if model is None else states | model.state_dict()

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return os.path.join(folder or self.folder, f"step-{step}")

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is finished, -1 if there is none."""
        complete = (Contents.DCP, Contents.HF)
        steps = [f.step for f in list_steps(folder or self.folder) if f.contents in complete]
        return max(steps, default=-1)

    def newest_step(self) -> int:
        """The newest whole step in this run's folder; -1 if there is none. Collective.

        Raises ValueError if there are steps and all of them are damaged.
        """
        if not self.enable:
            return -1
        newest = self._newest_whole_step(from_rank_zero(lambda: list_steps(self.folder)))
        return -1 if newest is None else newest.step

    def claim_folder(self) -> None:
        """Lock this run's folder against other jobs until `close`, and look at the free space.
        Collective.

        Raises RunError if another job writes there.
        """
        if not self.enable or self.load_only or self._lock is not None:
            return

        def lock() -> None:
            self._lock = FolderLock(self.folder)

        with one_error(f"The checkpoint folder {self.folder} cannot be used"):
            from_rank_zero(lock)
        n_bytes = self._estimated_bytes()
        if _rank() == 0:
            _warn_of_little_space(self.folder, n_bytes, self.keep_latest_k)

    def _estimated_bytes(self) -> int:
        """Of a checkpoint of all ranks: the weights, and two moments for each that is trained.
        Collective."""
        n_bytes, first_name = 0, ""
        for part in self.states[MODEL].model:
            for name, parameter in part.named_parameters():
                n_copies = 3 if parameter.requires_grad else 1
                n_bytes += n_copies * parameter.numel() * parameter.element_size()
                first_name = first_name or name
        # Sizes are global; only pipeline ranks have different parameters.
        return sum(dict(all_ranks((first_name, n_bytes))).values())

    def require_adapter(self) -> "BaseStateDictAdapter":
        """The model's adapter; ValueError if it has none."""
        if self.sd_adapter is None:
            raise ValueError(
                f"Checkpoints of {self.model_description} cannot be read or written in Hugging "
                "Face format: its TrainSpec has no state_dict_adapter"
            )
        return self.sd_adapter


def _warn_of_replacing(folder: str) -> None:
    if os.path.isdir(folder) and os.listdir(folder):
        contents = contents_of(folder)
        if contents == Contents.UNKNOWN:
            logger.warning(f"Saving in {folder}, which holds other files; they stay")
        elif contents != Contents.UNFINISHED:
            logger.warning(f"Replacing the checkpoint {folder}")


def _warn_of_little_space(folder: str, n_bytes: int, keep_latest_k: int) -> None:
    """keep_latest_k: 0 keeps all, whose number nobody knows."""
    n_more = 1
    if keep_latest_k:
        n_whole = sum(f.contents in (Contents.DCP, Contents.HF) for f in list_steps(folder))
        n_more = max(1, keep_latest_k + 1 - n_whole)  # old ones go after a new one is whole
    free = shutil.disk_usage(folder).free
    if free < n_more * n_bytes:
        logger.warning(
            f"{folder} has {free / GIB:.3f} GiB free; a checkpoint of this run has about "
            f"{n_bytes / GIB:.3f} GiB, and up to {n_more} more of them are kept at a time. Make "
            "room, or lower checkpoint.keep_latest_k"
        )


def _check_is_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"load(path=...) must be the folder of one checkpoint, got {path!r}, which is no "
            "folder; correct the path"
        )


def _check_holds_dcp(path: str, key: str) -> None:
    contents = contents_of(path)
    if contents == Contents.HF:
        raise ValueError(
            f"{key} {path!r} holds Hugging Face weights; set "
            "checkpoint.initial_load_in_hf = true to read them"
        )
    if contents == Contents.UNKNOWN:
        steps = ", ".join(os.path.basename(folder.path) for folder in list_steps(path))
        raise ValueError(
            f"{key} must be a checkpoint, which has a file .metadata, got "
            f"{path!r}; {f'name one of the checkpoints in it: {steps}' if steps else 'correct it'}"
        )


def _report_written(future: Future, path: str, start: float) -> None:
    """What went wrong is raised where the save is waited for."""
    if not future.cancelled() and future.exception() is None:
        seconds = time.monotonic() - start
        logger.info(
            f"{path} was written in the background in {seconds:.2f} s",
            extra=event("background save", seconds=seconds, path=path),
        )


def _resolved(path: str) -> str:
    return os.path.realpath(path)


def _rank() -> int:
    try:
        return dist.get_rank()
    except ValueError:  # a single process without process group
        return 0
