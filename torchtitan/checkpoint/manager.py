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
from torchtitan.distributed.ranks import from_rank_zero
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.events import event
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection


def _entry_of(part: str, name: str) -> property:
    """The attribute `name` of a part of the manager. It can be read and set at run time."""
    return property(
        lambda self: getattr(getattr(self, part), name),
        lambda self, value: setattr(getattr(self, part), name, value),
    )


class CheckpointManager:
    """Saves and loads the states of a run, following the `[checkpoint]` section.

    `states` is updated in place with the model, optimizer, schedulers and dataloader. Its values
    need not be `Stateful`. `sd_adapter` and the settings below may be set at run time.
    model_description: the name of the model in error messages.
    run_record: the settings that a resume compares (see `run_record.py`).

    Without a dataloader every `save` is due, because the caller drives the run.
    With `enable = false` only folders that the caller names by `path` are written and read.

    save_future: completes when the background save is written; None if there is none.
    staging_future, staging: whether the live tensors are still being copied to pinned memory.
    pg: the group for asynchronous saves, which must not share a group with the training's collectives.
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
        self.tokenizer: Any = None  # its files are written beside exported weights
        self.save_future: Future | None = None
        self._saving_to: str | None = None  # the folder that the background save writes
        self.staging_future: Future | None = None
        self.staging = False
        self.stager: Any = None
        self.pg: dist.ProcessGroup | None = None
        self._host_copies = HostCopies()
        self._lock: FolderLock | None = None
        # These objects don't refer to the manager, or it would live until a garbage collection.
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
        # Daemon threads are frozen while the interpreter ends, so joining one would never return.
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Wait for a running save and end the helper threads. May be called twice.

        Raises RuntimeError if the save failed.
        """
        if not hasattr(self, "_plans"):  # the constructor has raised
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
            self._host_copies = HostCopies()  # frees the memory of the old ones
            self._plans.forget()
            group, self.pg = self.pg, None
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # destroyed already, with an earlier default group
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

        The last step, every `interval`-th step, and with `enable_first_step_checkpoint` step 1 are
        due; without a dataloader, every step is.
        force: save even if the step is not due.
        path: save, due or not, to this folder instead of `<folder>/step-<curr_step>`. This run and
            later ones never remove the folder.

        Raises ValueError if the config forbids a save with `path` or `force`. Raises RunError (a
        RuntimeError) if this save or an earlier asynchronous one fails; older checkpoints are then
        untouched.
        """
        if path is not None or force:
            if self.load_only:
                raise ValueError(
                    "checkpoint.load_only = true forbids saving; set it to false, or set "
                    "checkpointer.load_only = False during this save"
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
            # Before the first byte, so that the folder is kept even if this save is killed.
            with self._explaining_failure(folder, f"The checkpoint {folder} could not be written"):
                from_rank_zero(lambda: mark_kept(folder))
        has_weights_only = last_step and self.last_save_model_only
        # The last save is synchronous in every mode, because the process is about to end.
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
        hint = ""
        if has_weights_only and curr_step > 0:  # the seed, step 0, has nothing but weights
            hint = (
                ", weights only: training cannot continue from it; "
                "checkpoint.last_save_model_only = false saves everything"
            )
        logger.info(
            f"Training waited {seconds:.2f} s for step {curr_step}'s save{hint}",
            extra=event("save", curr_step, seconds=seconds, in_background=in_background),
        )
        self._purge()  # last, so that a failed save removes no older checkpoint

    @torch.no_grad()
    def save_hf(self, path: str, dtype: torch.dtype | None = None) -> None:
        """Write the weights to safetensors files in the folder `path`; see `hf.save_to_hf`.

        Retention never removes the folder, because it is not a step. Raises RunError if writing fails.
        """
        self._wait_for_save()
        self.states[MODEL].refresh()
        states, adapter = self.states[MODEL].state_dict(), self.require_adapter()
        with self._explaining_failure(
            path, f"The Hugging Face files in {path} could not be written"
        ):
            save_to_hf(states, adapter, path, dtype, self.tokenizer)

    def maybe_wait_for_staging(self) -> None:
        """Wait until pinned copies are complete. Call it before the optimizer changes the weights.

        The host waits, and not the device, because the stager reports only after its last copy has
        finished. This costs little: the copies run beside the forward and backward that are queued
        already.
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
        # Made here and not in DCP, so that the copies wait for the device work that makes them.
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
            # A failure is raised by `_wait_for_save`.
            if not future.cancelled() and future.exception() is None:
                seconds = time.monotonic() - start
                logger.info(
                    f"{folder} was written in the background in {seconds:.2f} s",
                    extra=event("background save", seconds=seconds, path=folder),
                )

        if isinstance(self.save_future, Future):  # the reference's tests return other objects
            self.save_future.add_done_callback(report)

    def _join_group(self) -> None:
        if self.pg is None and dist.is_initialized():
            self.pg = dist.new_group(backend="gloo")

    def _wait_for_save(self) -> bool:
        """Wait for the background save; False if there is none. Raises RunError if it failed."""
        if self.save_future is None:
            return False
        future, path = self.save_future, self._saving_to
        self.save_future = self._saving_to = None
        with self._explaining_failure(path, f"The asynchronous save to {path} failed"):
            future.result()
        return True

    @contextmanager
    def _explaining_failure(self, folder: str | None, what: str) -> Iterator[None]:
        """Raise a failure of the block as one RunError, the same on all ranks.

        It names the newest whole checkpoint. The files in `folder` are removed, because they may be
        what fills the disk.
        """

        def advice() -> str:
            step = newest_finished_step(self.folder)
            newest = f": the last whole checkpoint in {self.folder} is that of step {step}"
            if step < 0:
                newest = f"; {self.folder} holds no whole checkpoint yet"
            return f". Fix this and start again{newest}"

        try:
            with dcp.one_error(what, advice):
                yield
        except BaseException as error:
            # Every rank gets the error, but perhaps not every rank has cached a plan.
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
        """Load a checkpoint; return False if there is none. Collective.

        step: the step to load from this run's own folder. -1 loads the newest whole step, or the
            configured initial checkpoint if there is none.
        path: the step folder to load, DCP or Hugging Face files. This run's folder and the initial
            checkpoint are then ignored.
        model_only: leave optimizer, schedule, step and data position as they are.

        Raises FileNotFoundError or ValueError if the named checkpoint is missing, is damaged, or
        belongs to another model.
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
        if OPTIMIZER in states or DATALOADER in states:  # the run continues, not from weights only
            saved_record = from_rank_zero(lambda: read_record(source.path))
            if OPTIMIZER in states:
                check_same_optimizer(saved_record, self.run_record, source.path)
            for difference in differences(saved_record, self.run_record, states):
                logger.warning(f"Continuing from {source.path}, but {difference}")
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
                # Files hold the tied parameter once, under the name of the embedding.
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

        Raises ValueError if no step is whole and at least one is damaged.
        """
        if not self.enable:
            return -1
        folders = from_rank_zero(lambda: list_steps(self.folder))
        newest = self._selection.newest_whole_step(self.folder, folders)
        return -1 if newest is None else newest.step

    def holds_weights_only(self, step: int) -> bool:
        """True if training cannot continue from this step of the run's folder. Collective."""
        path = self._create_checkpoint_id(step)

        def read() -> bool:
            if (saved := saved_shapes_in(path)) is None:
                return contents_of(path) == Contents.HF
            return not keys_outside_model(saved, self.states)

        return from_rank_zero(read)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest finished step; -1 if there is none."""
        return newest_finished_step(folder or self.folder)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return os.path.join(folder or self.folder, f"step-{step}")

    # States

    def release_model(self) -> None:
        """Drop the references to the parameters' memory; the next save or load gets them again."""
        self.states[MODEL].release()

    def require_adapter(self) -> BaseStateDictAdapter:
        """The model's adapter. Raises ValueError if it has none."""
        if self.sd_adapter is None:
            raise ValueError(
                f"Checkpoints of {self.model_description} cannot be read or written in Hugging "
                "Face format: its TrainSpec has no state_dict_adapter"
            )
        return self.sd_adapter

    def _flattened_model_states_sd(
        self, state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The states, with the model's entries at the top level under their own names."""
        states = dict(self.states if state_dict is None else state_dict)
        model = states.pop(MODEL, None)
        return states if model is None else states | model.state_dict()

    def _states_now(self) -> dict[str, Any]:
        """The contents of a full checkpoint, with the live tensors."""
        self.states[MODEL].refresh()
        return {
            name: state.state_dict() if isinstance(state, Stateful) else state
            for name, state in self._flattened_model_states_sd().items()
        }

    # The folder

    def claim_folder(self) -> None:
        """Lock this run's folder until `close`, and warn if there is little free space. Collective.

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
        """True if both managers write step folders, and to the same place."""
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
