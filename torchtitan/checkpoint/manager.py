"""Saving and loading a run: model, optimizer, schedulers, data position and step.

All of it is written and read by torch's distributed checkpoint (DCP), so that a run may continue
on another number of ranks.
"""

import copy
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import (
    Contents,
    HashingWriter,
    contents_of,
    list_steps,
    mark_kept,
    newest_finished_step,
    remove_failed_save,
)
from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.checkpoint.retention import Retention, estimated_bytes, warn_of_little_space
from torchtitan.checkpoint.run_record import check_same_optimizer, differences, read_record
from torchtitan.checkpoint.selection import Selection
from torchtitan.checkpoint.staging import (
    AsyncMode,
    HostCopies,
    order_staging_after_compute,
    pinned_stager,
)
from torchtitan.checkpoint.states import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    ModelWrapper,
    fit_to_checkpoint,
    keys_outside_model,
    saved_shapes_in,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.config.checks.values import checkpoint_settings, hf_conversion
from torchtitan.config.job_config import Checkpoint
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.distributed import tied_copies
from torchtitan.distributed.fault_tolerance import FTManager
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.events import event
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection


def _entry_of(part: str, name: str) -> property:
    """The attribute `name` of a part of the manager, to be read and set at run time."""
    return property(
        lambda self: getattr(getattr(self, part), name),
        lambda self, value: setattr(getattr(self, part), name, value),
    )


class CheckpointManager:
    """Saves and loads the states of a run, as the `[checkpoint]` section says.

    `states` is updated in place with the model, optimizer, schedulers and dataloader. Entries
    need not be `Stateful`. `sd_adapter` and the entries below may be set at run time.
    `model_description` is what error messages call the model; `run_record` is what a resume
    compares (see `run_record.py`).

    Without a dataloader the manager is driven by its caller: each `save` is due.
    With `enable = false` only the folders that calls name by `path` are written and read.

    save_future: ends when the save in the background is written; None without one.
    staging_future, staging: whether pinned copies are still being made of the live tensors.
    pg: of asynchronous saves, which must not share a group with the training's own collectives.
    """

    enable = _entry_of("_config", "enable")
    load_only = _entry_of("_config", "load_only")
    interval = _entry_of("_config", "interval")
    keep_latest_k = _entry_of("_config", "keep_latest_k")
    enable_first_step_checkpoint = _entry_of("_config", "enable_first_step_checkpoint")
    exclude_from_loading = _entry_of("_config", "exclude_from_loading")
    verify_on_load = _entry_of("_config", "verify_on_load")
    initial_load_path = _entry_of("_config", "initial_load_path")
    initial_load_model_only = _entry_of("_config", "initial_load_model_only")
    initial_load_in_hf = _entry_of("_config", "initial_load_in_hf")
    initial_load_in_hf_quantized = _entry_of("_config", "initial_load_in_hf_quantized")
    last_save_model_only = _entry_of("_config", "last_save_model_only")
    last_save_in_hf = _entry_of("_config", "last_save_in_hf")
    purge_thread = _entry_of("_retention", "thread")
    purge_queue = _entry_of("_retention", "queue")
    enable_staging = property(lambda self: self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM)

    def __init__(
        self,
        dataloader: BaseDataLoader | None,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        states: dict[str, Any],
        checkpoint_config: Checkpoint,
        sd_adapter: BaseStateDictAdapter | None,
        base_folder: str = "",
        ft_manager: FTManager | None = None,
    ) -> None:
        self.sd_adapter = sd_adapter
        self.model_description = " + ".join(type(part).__name__ for part in model_parts)
        self._config = copy.copy(checkpoint_config)
        if self.enable:
            refuse(checkpoint_settings(checkpoint_config))
            if sd_adapter is None:
                refuse(hf_conversion(checkpoint_config, "one without state_dict_adapter"))
        self.async_mode = AsyncMode(checkpoint_config.async_mode.lower())
        if ft_manager is not None and ft_manager.enabled:
            raise NotImplementedError(
                "Checkpoints under torchft are not available; set fault_tolerance.enable = false"
            )
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
        self.folder = os.path.join(base_folder, checkpoint_config.folder)
        self.export_dtype = TORCH_DTYPE_MAP[checkpoint_config.export_dtype]
        self.run_record: dict[str, Any] = {}
        self.tokenizer: Any = None  # whose files go beside exported weights
        self.save_future: Future | None = None
        self._saving_to: str | None = None  # the folder that `save_future` is about
        self.staging_future: Future | None = None
        self.staging = False
        self.stager: Any = None
        self.pg: dist.ProcessGroup | None = None
        self._host_copies = HostCopies()
        self._lock: FolderLock | None = None
        # None of these refers to the manager, which would keep it alive until a collection.
        self._retention = Retention(self.folder)
        if self.initial_load_path:
            self._retention.given.add(os.path.realpath(self.initial_load_path))
        self._selection = Selection(self._config, self._retention.damaged)
        self._plans = dcp.SavePlans()
        if self.enable:
            if self.keep_latest_k > 0:
                self._retention.start()
            logger.info(f"Checkpointing is on, in {self.folder}")

    def __del__(self) -> None:
        # Daemon threads are frozen while the interpreter ends; joining one would never return.
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Wait for a running save, and end the helper threads. May be called twice.

        Raises RuntimeError if that save failed.
        """
        if not hasattr(self, "_plans"):  # the constructor has refused its arguments
            return
        try:
            if self._wait_for_save():
                self._purge()
        finally:
            self._retention.close()
            if self.stager is not None:
                self.stager.close()
                self.stager = None
            self._host_copies.close()
            self._host_copies = HostCopies()  # gives the memory back
            self._plans.forget()
            group, self.pg = self.pg, None
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # it went with an earlier default group
                    dist.destroy_process_group(group)
            if self._lock is not None:
                self._lock.release()
                self._lock = None

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

        Due are the last step, every `interval` steps, and step 1 with
        `enable_first_step_checkpoint`; without a dataloader, every step.
        force: the step is due.
        path: the step folder to write in place of `<folder>/step-<curr_step>`; the step is due
            then. This run and later ones never remove the folder.

        Raises ValueError if the config forbids what path or force ask for, RunError (a
        RuntimeError) if this save, or an asynchronous one before it, fails; older checkpoints are
        then untouched.
        """
        if path is not None or force:
            if self.load_only:
                raise ValueError(
                    "checkpoint.load_only = true forbids to save; set it to false, or "
                    "checkpointer.load_only = False for the time of this save"
                )
            if path is None and not self.enable:
                raise ValueError(
                    "checkpoint.enable = false leaves no folder to save in; give the step folder "
                    "as path, or set checkpoint.enable = true"
                )
        elif not self._should_save(curr_step, last_step):
            if self.enable and not self.load_only and self.async_mode == AsyncMode.ASYNC:
                self._join_group()
                self._host_copies.prepare(self._states_now)
            return
        self._wait_for_save()
        start = time.monotonic()
        if path is None:
            folder = self._create_checkpoint_id(curr_step)
            self._retention.will_write(folder, warns=_rank() == 0)
        else:
            folder = os.fspath(path)
            self._retention.given.add(os.path.realpath(folder))
            # Before the first byte: a save that is killed leaves a folder that is still kept.
            with self._explaining_failure(folder, f"The checkpoint {folder} could not be written"):
                from_rank_zero(lambda: mark_kept(folder))
        has_weights_only = last_step and self.last_save_model_only
        # The last save is synchronous in every mode: the process is about to end.
        if last_step or self.async_mode == AsyncMode.DISABLED:
            self.states[MODEL].refresh()
            states = self._flattened_model_states_sd()
            if has_weights_only:
                states = {
                    name: tensor.to(self.export_dtype) if tensor.is_floating_point() else tensor
                    for name, tensor in self.states[MODEL].state_dict().items()
                }
            to_hf = last_step and self.last_save_in_hf
            self.dcp_save(states, folder, AsyncMode.DISABLED, True, to_hf)
        else:
            self._save_in_background(folder)
        seconds, in_background = time.monotonic() - start, self.save_future is not None
        told = ""
        if has_weights_only and curr_step > 0:  # a seed has no more to keep
            told = (
                ", weights only: training cannot continue from it; "
                "checkpoint.last_save_model_only = false saves everything"
            )
        logger.info(
            f"Training waited {seconds:.2f} s for step {curr_step}'s save{told}",
            extra=event("save", curr_step, seconds=seconds, in_background=in_background),
        )
        self._purge()  # last, so that a save that fails costs no older checkpoint

    @torch.no_grad()
    def save_hf(self, path: str, dtype: torch.dtype | None = None) -> None:
        """Write the weights to safetensors files in the folder `path`; see `hf.save_to_hf`.

        The folder is no step of this run; nothing here removes it. Raises RunError if this fails.
        """
        self._wait_for_save()
        self.states[MODEL].refresh()
        states, adapter = self.states[MODEL].state_dict(), self.require_adapter()
        with self._explaining_failure(
            path, f"The Hugging Face files in {path} could not be written"
        ):
            save_to_hf(states, adapter, path, dtype, self.tokenizer)

    def maybe_wait_for_staging(self) -> None:
        """Call before the optimizer changes the weights: a pinned save may still be copying.

        The host waits, for the stager says no earlier than at the end of its copies that all of
        them are queued, and only then could the device wait in its place. It costs little: the
        copies run beside the forward and backward that are queued already.
        """
        if self.staging:
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
        result = None
        arguments: dict[str, Any] = {"checkpoint_id": checkpoint_id}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            arguments["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            arguments["async_stager"] = self.stager
        copies = self._host_copies if async_mode == AsyncMode.ASYNC else None
        what = f"The checkpoint {checkpoint_id} could not be written"
        with self._explaining_failure(checkpoint_id, what):
            if to_hf:
                adapter = self.require_adapter()
                save_to_hf(state_dict, adapter, checkpoint_id, tokenizer=self.tokenizer)
            else:
                arguments |= self._plans.arguments()
                arguments["storage_writer"] = HashingWriter(checkpoint_id, self.run_record, copies)
                if async_mode == AsyncMode.DISABLED:
                    dcp.save(state_dict, **arguments)
                else:
                    result = dcp.async_save(state_dict, process_group=self.pg, **arguments)
        if enable_garbage_collection:
            GarbageCollection.collect("after saving a checkpoint")
        return result

    def _save_in_background(self, folder: str) -> None:
        GarbageCollection.collect("before saving a checkpoint")
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM and self.stager is None:
            self.stager = pinned_stager()
            if self.stager is None:
                self.async_mode = AsyncMode.ASYNC
        self._join_group()
        # Made here and not in DCP, so that the copies wait for what the device does to make them.
        states = self._states_now()
        is_pinned = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        if is_pinned:
            order_staging_after_compute(self.stager)
        result = self.dcp_save(states, folder, self.async_mode, True)
        self._saving_to = folder
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

    def _join_group(self) -> None:
        if self.pg is None and dist.is_initialized():
            self.pg = dist.new_group(backend="gloo")

    def _wait_for_save(self) -> bool:
        """Wait for the save in the background; False if there is none. RunError if it failed."""
        if self.save_future is None:
            return False
        future, path = self.save_future, self._saving_to
        self.save_future = self._saving_to = None
        with self._explaining_failure(path, f"The asynchronous save to {path} failed"):
            future.result()
        return True

    @contextmanager
    def _explaining_failure(self, folder: str | None, what: str) -> Iterator[None]:
        """Make one RunError, the same on all ranks, of what fails inside; it says what is left.

        What was written to `folder` is removed then: it may be what fills the disk.
        """

        def advice() -> str:
            step = newest_finished_step(self.folder)
            left = f": the last whole checkpoint in {self.folder} is that of step {step}"
            if step < 0:
                left = f"; {self.folder} holds no whole checkpoint yet"
            return f". Mend that and start again{left}"

        try:
            with dcp.one_error(what, advice):
                yield
        except BaseException as error:
            # All ranks get the error, but only some of them may remember a plan.
            self._plans.forget()
            if folder and isinstance(error, RunError) and _rank() == 0:
                with suppress(OSError):
                    remove_failed_save(folder)
            raise

    def _should_save(self, curr_step: int, last_step: bool) -> bool:
        if not self.enable or self.load_only:
            return False
        if self.states[DATALOADER] is None:
            return True
        is_wanted_first_step = curr_step == 1 and self.enable_first_step_checkpoint
        return last_step or is_wanted_first_step or curr_step % self.interval == 0

    def _purge(self) -> None:
        if self.enable and self.keep_latest_k > 0 and _rank() == 0:
            self._retention.purge(self.folder, self.keep_latest_k, self._saving_to)

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
        for name in self.exclude_from_loading:
            if name not in self.states:
                raise ConfigError(
                    f"checkpoint.exclude_from_loading can hold {', '.join(self.states)}, got "
                    f"{name!r}; correct or remove it"
                )
        self._wait_for_save()
        if path is None:
            source = self._selection.own(self.folder, step) or self._selection.initial(
                self.require_adapter
            )
        else:
            self._retention.given.add(os.path.realpath(path))
            source = self._selection.at(os.fspath(path), model_only)
        if source is None:
            logger.info(f"No checkpoint to load in {self.folder}: starting from scratch")
            return False
        logger.info(f"Loading the checkpoint {source.path}")
        start = time.monotonic()
        self.states[MODEL].refresh()
        if source.model_only or model_only:
            states = self.states[MODEL].state_dict()
        else:
            # An absent dataloader has nothing to restore.
            kept = {
                name: state
                for name, state in self.states.items()
                if name not in self.exclude_from_loading and state is not None
            }
            states = self._flattened_model_states_sd(kept)
        if not source.from_hf:
            states = fit_to_checkpoint(states, self.states, source.path, self.model_description)
        if OPTIMIZER in states or DATALOADER in states:  # the run goes on, with more than weights
            saved_record = from_rank_zero(lambda: read_record(source.path))
            if OPTIMIZER in states:
                check_same_optimizer(saved_record, self.run_record, source.path)
            for difference in differences(saved_record, self.run_record, states):
                logger.warning(f"{source.path} is continued, but {difference}")
        self.dcp_load(states, source.path, source.from_hf, source.from_quantized)
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
            if any(map(tied_copies.holds_second, self.states[MODEL].model)):
                # Files have the parameter once, under the name of the embedding.
                state_dict = {tied_copies.FIRST: state_dict[tied_copies.SECOND]} | state_dict
            state_dict = load_from_hf(
                state_dict,
                self.require_adapter(),
                checkpoint_id,
                from_quantized,
                self.model_description,
            )
        else:
            with dcp.one_error(f"The checkpoint {checkpoint_id} could not be read"):
                dcp.load(state_dict, checkpoint_id=checkpoint_id)
        self.states[MODEL].load_state_dict(state_dict)

    def newest_step(self) -> int:
        """The newest whole step in this run's folder; -1 if there is none. Collective.

        Raises ValueError if there are steps and all of them are damaged.
        """
        if not self.enable:
            return -1
        folders = from_rank_zero(lambda: list_steps(self.folder))
        newest = self._selection.newest_whole_step(self.folder, folders)
        return -1 if newest is None else newest.step

    def holds_weights_only(self, step: int) -> bool:
        """Whether that step of this run's folder has nothing to continue training with. Collective."""
        path = self._create_checkpoint_id(step)

        def look() -> bool:
            if (saved := saved_shapes_in(path)) is None:
                return contents_of(path) == Contents.HF
            return not keys_outside_model(saved, self.states)

        return from_rank_zero(look)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is finished, -1 if there is none."""
        return newest_finished_step(folder or self.folder)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return os.path.join(folder or self.folder, f"step-{step}")

    # States

    def release_model(self) -> None:
        """Hold no parameter's memory; each save and load takes hold of it again."""
        self.states[MODEL].release()

    def require_adapter(self) -> BaseStateDictAdapter:
        """The model's adapter; ValueError if it has none."""
        if self.sd_adapter is None:
            raise ValueError(
                f"Checkpoints of {self.model_description} cannot be read or written in Hugging "
                "Face format: its TrainSpec has no state_dict_adapter"
            )
        return self.sd_adapter

    def _flattened_model_states_sd(
        self, state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The states with the model's entries at the top level, under their own names."""
        states = dict(self.states if state_dict is None else state_dict)
        model = states.pop(MODEL, None)
        return states if model is None else states | model.state_dict()

    def _states_now(self) -> dict[str, Any]:
        """What a full checkpoint holds, with the live tensors."""
        self.states[MODEL].refresh()
        return {
            name: state.state_dict() if isinstance(state, Stateful) else state
            for name, state in self._flattened_model_states_sd().items()
        }

    # The folder

    def claim_folder(self) -> None:
        """Lock this run's folder against other jobs until `close`, and look at the free space.
        Collective.

        Raises RunError if another job writes there.
        """
        if not self.enable or self.load_only or self._lock is not None:
            return

        def lock() -> None:
            self._lock = FolderLock(self.folder)

        with dcp.one_error(f"The checkpoint folder {self.folder} cannot be used"):
            from_rank_zero(lock)
        n_bytes = estimated_bytes(self.states[MODEL].model)
        if _rank() == 0:
            warn_of_little_space(self.folder, n_bytes, self.keep_latest_k)

    def saves_where(self, other: "CheckpointManager") -> bool:
        """Whether both write step folders, and side by side."""
        return (
            self is not other
            and all(manager.enable and not manager.load_only for manager in (self, other))
            and os.path.realpath(self.folder) == os.path.realpath(other.folder)
        )


def _rank() -> int:
    try:
        return dist.get_rank()
    except ValueError:  # a single process without process group
        return 0
