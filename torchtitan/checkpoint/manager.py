"""Saving and loading a run: model, optimizer, schedulers, data position and step.

Everything is written and read by torch's distributed checkpoint (DCP), so that a run may
continue on another number of ranks.
"""

import copy
import os
import sys
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import list_steps, mark_kept, newest_finished_step
from torchtitan.checkpoint.hf import load_from_hf
from torchtitan.checkpoint.retention import Retention, estimated_bytes, warn_of_little_space
from torchtitan.checkpoint.run_record import check_same_optimizer, differences, read_record
from torchtitan.checkpoint.saving import AsyncMode, Saver
from torchtitan.checkpoint.selection import Selection
from torchtitan.checkpoint.states import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    ModelWrapper,
    fit_to_checkpoint,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.config.checks.values import checkpoint_settings, hf_conversion
from torchtitan.config.job_config import Checkpoint
from torchtitan.distributed.ranks import from_rank_zero
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.events import event
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

if TYPE_CHECKING:  # torchdata takes long to load, and engines without data do without it
    from torchtitan.data.dataloader import BaseDataLoader
    from torchtitan.distributed.fault_tolerance import FTManager


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
    folder = _entry_of("_saver", "run_folder")
    async_mode = _entry_of("_saver", "mode")
    save_future = _entry_of("_saver", "save_future")
    staging_future = _entry_of("_saver", "staging_future")
    staging = _entry_of("_saver", "staging")
    stager = _entry_of("_saver", "stager")
    pg = _entry_of("_saver", "group")
    purge_thread = _entry_of("_retention", "thread")
    purge_queue = _entry_of("_retention", "queue")
    enable_staging = property(lambda self: self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM)

    def __init__(
        self,
        dataloader: "BaseDataLoader | None",
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        states: dict[str, Any],
        checkpoint_config: Checkpoint,
        sd_adapter: BaseStateDictAdapter | None,
        base_folder: str = "",
        ft_manager: "FTManager | None" = None,
    ) -> None:
        self.sd_adapter = sd_adapter
        self.model_description = " + ".join(type(part).__name__ for part in model_parts)
        self._config = copy.copy(checkpoint_config)
        if self.enable:
            refuse(checkpoint_settings(checkpoint_config))
            if sd_adapter is None:
                refuse(hf_conversion(checkpoint_config, "one without state_dict_adapter"))
        async_mode = checkpoint_config.async_mode.lower()
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
        folder = os.path.join(base_folder, checkpoint_config.folder)
        self.export_dtype = TORCH_DTYPE_MAP[checkpoint_config.export_dtype]
        self.run_record: dict[str, Any] = {}
        self._lock: FolderLock | None = None
        # None of these refers to the manager, which would keep it alive until a collection.
        self._retention = Retention(folder)
        if self.initial_load_path:
            self._retention.given.add(os.path.realpath(self.initial_load_path))
        self._selection = Selection(self._config, self._retention.damaged)
        self._saver = Saver(folder, AsyncMode(async_mode))
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
        if not hasattr(self, "_saver"):  # the constructor has refused its arguments
            return
        try:
            if self._saver.wait():
                self._purge()
        finally:
            self._retention.close()
            self._saver.close()
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
            if self.enable and not self.load_only:
                self._saver.prepare(self._states_now)
            return
        self._saver.wait()
        start = time.monotonic()
        if path is None:
            folder = self._create_checkpoint_id(curr_step)
            self._retention.will_write(folder, warns=_rank() == 0)
        else:
            folder = os.fspath(path)
            self._retention.given.add(os.path.realpath(folder))
            with self._saver.explaining_failure(f"The checkpoint {folder} could not be written"):
                from_rank_zero(lambda: mark_kept(folder))
        if last_step or self.async_mode == AsyncMode.DISABLED:
            # The last save is synchronous in every mode: the process is about to end.
            self.states[MODEL].refresh()
            states = self._flattened_model_states_sd()
            if last_step and self.last_save_model_only:
                states = {
                    name: tensor.to(self.export_dtype) if tensor.is_floating_point() else tensor
                    for name, tensor in self.states[MODEL].state_dict().items()
                }
            to_hf = last_step and self.last_save_in_hf
            self.dcp_save(states, folder, AsyncMode.DISABLED, True, to_hf)
        else:
            self._saver.start(self._states_now, folder, self.run_record)
        seconds = time.monotonic() - start
        logger.info(
            f"Training waited {seconds:.2f} s for step {curr_step}'s save",
            extra=event(
                "save", curr_step, seconds=seconds, in_background=self.save_future is not None
            ),
        )
        self._purge()

    def maybe_wait_for_staging(self) -> None:
        """Call before the optimizer changes the weights: a pinned save may still be copying."""
        self._saver.wait_for_staging()

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
        adapter = self.require_adapter() if to_hf else None
        result = self._saver.write(state_dict, checkpoint_id, async_mode, self.run_record, adapter)
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

    def _purge(self) -> None:
        if self.enable and self.keep_latest_k > 0 and _rank() == 0:
            self._retention.purge(self.folder, self.keep_latest_k, self._saver.saving_to)

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
        self._saver.wait()
        if path is None:
            source = self._selection.own(self.folder, step) or self._selection.initial(
                self.require_adapter
            )
        else:
            self._retention.given.add(os.path.realpath(path))
            source = self._selection.at(os.fspath(path))
        if source is None:
            logger.info(f"No checkpoint to load in {self.folder}: starting from scratch")
            return False
        logger.info(f"Loading the checkpoint {source.path}")
        start = time.monotonic()
        self.states[MODEL].refresh()
        states = self._states_to_load(source.model_only or model_only)
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
