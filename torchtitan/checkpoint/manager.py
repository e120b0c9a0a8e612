"""Saving and loading a run: model, optimizer, schedulers, data position and step."""

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torchtitan.adapters.peft_config import PeftOptions
from torchtitan.adapters.peft_files import check_layers, load_peft, save_peft
from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.folder import (
    KEPT_MARKER,
    UNFINISHED_MARKER,
    mark_unfinished,
    recorded_hashes,
    upload_folder,
)
from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.checkpoint.hf_assets import untrained_parts
from torchtitan.checkpoint.retention import Retention, warning
from torchtitan.checkpoint.run_record import compare_with_saved
from torchtitan.checkpoint.saver import AsyncMode, Saver, is_rank_zero
from torchtitan.checkpoint.selection import Facts, Selection, at_path
from torchtitan.checkpoint.states import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    WEIGHTS_ONLY,
    ModelWrapper,
    cast_weights,
    fit_to_checkpoint,
    live_states,
    with_model_on_top,
    without_excluded,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.checks.common import refuse
from torchtitan.config.checks.values import checkpoint_settings, hf_conversion
from torchtitan.config.job_config import Checkpoint, LoRA
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.distributed import tied_copies
from torchtitan.distributed.processes.ranks import from_rank_zero, on_all_ranks
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools import storage
from torchtitan.tools.errors import RunError
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

_WEIGHTS_ONLY_HINT = (
    ", weights only: training cannot continue from it; "
    "checkpoint.last_save_model_only = false saves everything"
)


def _differ(folder: str, address: str) -> bool:
    """True if the checkpoint at `address` is incomplete, or differs from the one in `folder`."""
    hashes, there = recorded_hashes(folder), storage.find(address)
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in hashes}
    if UNFINISHED_MARKER in there or any(
        name not in there or there[name].st_size != size for name, size in sizes.items()
    ):
        return True
    with suppress(ValueError):  # the hash file at `address` is damaged
        return recorded_hashes(address) != hashes
    return True


class CheckpointManager:
    """Saves and loads the states of a run, following the `[checkpoint]` section.

    The constructor adds the model, optimizer, schedulers and dataloader to `states`. Every setting is
    an attribute; the settings and `sd_adapter` may be changed at run time.
    model_description: the name of the model in error messages. run_record: see `run_record.py`.
    tokenizer, chat_template: written beside exported weights. chosen_args: see `hf.load_from_hf`.
    lora: the settings of the model's adapters. Checkpoints then hold only trained parameters, and
        the name and digest of the base model.

    Without a dataloader every `save` is due, because the caller drives the run.
    With `enable = false` only the initial checkpoint and folders named by `path` are used.
    """

    # torchtitan 0.2.x has these attributes on the manager, not on a saver or a retention object.
    save_future = property(lambda self: self._saver.future)
    staging = property(lambda self: self._saver.staging)
    staging_future = property(lambda self: self._saver.staging_future)
    stager = property(lambda self: self._saver.stager)
    pg = property(lambda self: self._saver.group)
    purge_thread = property(lambda self: self._retention.thread)
    purge_queue = property(lambda self: self._retention.queue)
    enable_staging = property(lambda self: self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM)
    has_stopped = False  # True after a save that ends the run before its last step

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
        ft_manager: Any = None,
        lora: LoRA | None = None,
    ) -> None:
        config = checkpoint_config
        for field in dataclasses.fields(Checkpoint):
            setattr(self, field.name, getattr(config, field.name))
        self.sd_adapter = sd_adapter
        self.model_description = " + ".join(type(part).__name__ for part in model_parts)
        refuse(checkpoint_settings(config))
        if sd_adapter is None:
            refuse(hf_conversion(config, "one without state_dict_adapter"))
        self.async_mode = AsyncMode(config.async_mode.lower())
        if ft_manager is not None and ft_manager.enabled:
            raise NotImplementedError(
                "Checkpoints under torchft are not available; set fault_tolerance.enable = false"
            )
        self.ft_manager = None
        self.enable_ft_dataloader_checkpoints = False
        self.states = states
        self.states[MODEL] = self.adapters = ModelWrapper(model_parts, lora)
        self.lora, self.has_adapters = lora, lora is not None
        self.states[OPTIMIZER] = optimizers
        self.states[DATALOADER] = dataloader
        self.states[LR_SCHEDULER] = lr_schedulers
        # Steps are written to `folder`. If checkpoint.folder is an address, they are then uploaded there.
        name, self.bucket = config.places()
        self.folder = os.path.join(base_folder, name)
        self.export_dtype = TORCH_DTYPE_MAP[config.export_dtype]
        self.run_record: dict[str, Any] = {}
        self.tokenizer: Any = None
        self.chat_template: str | None = None
        self.chosen_args: Collection[str] | None = ()
        self._untrained_base = "", ""  # (path of the base model, local folder with its files)
        # These objects hold no reference to the manager: a cycle would delay its deletion.
        self._saver = Saver()
        self._retention = Retention(self.folder, self.bucket)
        if self.initial_load_path:
            self._retention.leave_alone(self.initial_load_path)
        self._selection = Selection(self._retention.damaged, self.bucket)
        if self.enable and (self.last_save_peft or self.save_peft_interval):
            adapters = self.adapters
            adapters.require_lora("checkpoint.last_save_peft or save_peft_interval")
            check_layers(adapters.model, adapters.whole(), self.require_adapter())
        if self.enable:
            if self.keep_latest_k > 0:
                self._retention.start()
            where = f"{self.folder}, uploaded to {self.bucket}" if self.bucket else self.folder
            logger.info(f"Checkpointing is on, in {where}")

    def __del__(self) -> None:
        # At interpreter exit, daemon threads no longer run, so joining them would hang.
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Wait for a running save and end the helper threads. Raises RunError if the save failed."""
        if not hasattr(self, "_selection"):  # the constructor failed earlier
            return
        try:
            if self._saver.wait(self.folder):
                self._purge()
        finally:
            self._retention.close()
            self._saver.close()

    @torch.no_grad()
    def save(
        self,
        curr_step: int,
        last_step: bool = False,
        *,
        path: str | None = None,
        force: bool = False,
        since: int | None = None,
    ) -> None:
        """Save if this step is due, and the adapters in PEFT's format if they are due. Collective.

        The last step, every `interval`-th step, and with `enable_first_step_checkpoint` step 1 are
        due; without a dataloader, every step is. For adapters see `last_save_peft` and
        `save_peft_interval`; their folders `<folder>/peft-step-<curr_step>` are never removed.
        force: save even if the step is not due. path: save to this folder, even if the step is not due;
            no run removes it, and no adapters are written in PEFT's format.
        since: the step of the previous call. Save only if a step after `since`, up to and including
            `curr_step`, is due by the config, even without a dataloader.

        Raises ValueError if the config forbids a save with `path` or `force`. Raises RunError (a
        RuntimeError) if this save or the previous asynchronous save fails; older checkpoints stay.
        """
        if (path is not None or force) and self.load_only:
            raise ValueError(
                "checkpoint.load_only = true forbids saving; set it to false, or set "
                "checkpointer.load_only = False during this save"
            )
        if force and path is None and not self.enable:
            raise ValueError(
                "checkpoint.enable = false leaves no folder to save in; give the step folder as "
                "path, or set checkpoint.enable = true"
            )
        steps = range(curr_step if since is None else since + 1, curr_step + 1)
        is_callers_choice = since is None and self.states[DATALOADER] is None
        is_due = any(self._should_save(step, last_step) for step in steps)
        is_due |= is_callers_choice and self.enable and not self.load_only
        if path is not None or force or is_due:
            self._save(curr_step, last_step, path)
        if path is None and any(self.is_peft_due(step, last_step) for step in steps):
            self.save_peft(storage.join(self.bucket or self.folder, f"peft-step-{curr_step}"))

    def _save(self, curr_step: int, last_step: bool, path: str | None = None) -> None:
        self._saver.wait(self.folder)
        start = time.monotonic()
        # Drop the cached newest step, which this save may replace.
        self._selection = Selection(self._retention.damaged, self.bucket)
        address = ""
        if path is None:
            folder = self._create_checkpoint_id(curr_step)
            self._retention.will_write(folder, warns=is_rank_zero())
            if self.bucket:
                address = storage.join(self.bucket, f"step-{curr_step}")
                self._retention.will_write(address, warns=False)
        else:
            folder = os.fspath(path)
            if storage.is_address(folder):
                folder, address = self._staged(folder), folder
            self._retention.leave_alone(address or folder)

            def begin() -> None:
                if address:
                    storage.check_writable(address)
                mark_unfinished(folder, KEPT_MARKER)  # before any file: the save may be killed

            what = f"The checkpoint {address or folder} could not be written"
            with self._saver.one_error(what, folder, self.folder):
                from_rank_zero(begin)
        has_weights_only = last_step and self.last_save_model_only
        # The last save is synchronous in every mode, because the process is about to end.
        if last_step or self.async_mode == AsyncMode.DISABLED:
            to_hf = last_step and self.last_save_in_hf
            if has_weights_only:
                weights = self.adapters.merged() if to_hf else self.states[MODEL].state_dict()
                states = cast_weights(weights, self.export_dtype)
            else:
                states = with_model_on_top(self.states)
            self.dcp_save(states, folder, AsyncMode.DISABLED, True, to_hf)
            if address:
                self._saver.prepare(AsyncMode.DISABLED)
                self._saver.follow(None, folder, self._upload(folder, address))
                if path is not None:  # the program may end without `close`
                    self._saver.wait(self.folder)
        else:
            GarbageCollection.collect("before saving a checkpoint")
            self.async_mode = self._saver.prepare(self.async_mode)
            # Build the states first: `Saver.save` makes the copies wait for device work queued so far.
            states = live_states(self.states)
            result = self.dcp_save(states, folder, self.async_mode, True)
            self._saver.follow(result, folder, self._upload(folder, address) if address else None)
        seconds, in_background = time.monotonic() - start, self.save_future is not None
        hint = _WEIGHTS_ONLY_HINT if has_weights_only and curr_step > 0 else ""
        logger.info(
            f"Training waited {seconds:.2f} s for step {curr_step}'s save{hint}",
            extra=event("save", curr_step, seconds=seconds, in_background=in_background),
        )
        self._purge()  # last, so that a failed save removes no older checkpoint

    def _upload(self, folder: str, address: str) -> Callable[[], None]:
        """Return a function that uploads a written folder. It holds no reference to this manager."""
        group, retention = self._saver.group, self._retention
        bucket = self.bucket if self.enable else ""
        n_kept = self.keep_latest_k if is_rank_zero() else 0

        def work() -> None:
            upload_folder(folder, address, group)
            if folder == storage.staging_folder(address):
                shutil.rmtree(folder, ignore_errors=True)
            elif bucket and n_kept > 0:
                with warning(bucket):
                    retention.purge(bucket, n_kept, None)

        return work

    def _staged(self, address: str) -> str:
        """Return the cache folder where files are written before their upload to `address`."""
        folder = storage.staging_folder(address)
        self._saver.address_of[folder] = address
        return folder

    @contextmanager
    def _written_to(self, path: str, what: str) -> Iterator[str]:
        """Yield the local folder to write. If `path` is an address, upload the folder afterwards."""
        folder = path
        if storage.is_address(path):
            folder = self._staged(path)
            self._saver.wait(self.folder)
        with self._saver.one_error(what, folder, self.folder):
            if folder != path:
                from_rank_zero(lambda: storage.check_writable(path))
            yield folder
            if folder != path:
                self._saver.prepare(AsyncMode.DISABLED)
                self._upload(folder, path)()

    @torch.no_grad()
    def save_hf(self, path: str, dtype: torch.dtype | None = None) -> None:
        """Write the weights, with adapters merged, to safetensors files; see `hf.save_to_hf`.

        Raises RunError on failure.
        """
        self._saver.wait(self.folder)
        self.require_adapter()
        states = self.adapters.merged(dtype)
        with self._written_to(path, f"The Hugging Face files in {path} could not be written") as to:
            self._save_to_hf(states, to, dtype)

    def _save_to_hf(
        self, states: dict[str, Any], path: str, dtype: torch.dtype | None = None
    ) -> None:
        adapter, untrained = self.require_adapter(), None
        if self.untrained_weights == "copy":
            try:
                base = self._base_of_untrained()
                untrained = from_rank_zero(lambda: untrained_parts(base, adapter))
            except RunError as error:  # an export at the end of a run must not fail
                logger.warning(f"The export lacks the parts that are not trained: {error}")
        tokenizer, template = self.tokenizer, self.chat_template
        save_to_hf(states, adapter, path, dtype, tokenizer, template, untrained)

    def _base_of_untrained(self) -> str:
        """Return a local folder with the base model, from which an export copies untrained parts. Collective.

        The first call, made by `load`, downloads a base at an address. Raises RunError if that fails.
        """
        base = self.initial_load_in_hf and self.initial_load_path or ""
        base = base or getattr(self.sd_adapter, "hf_assets_path", None) or ""
        if self._untrained_base[0] != base:
            what = f"checkpoint.untrained_weights = 'copy' needs the files in {base}"
            with dcp.one_error(what):
                self._untrained_base = base, self._fetched(base)
        return self._untrained_base[1]

    @torch.no_grad()
    def save_peft(self, path: str, base_model: str | None = None, rank: int | None = None) -> None:
        """Write the adapters to the folder `path` in PEFT's format. Collective.

        base_model: the name or folder of the base model; None: the base model that was loaded.
        rank: write only the first `rank` rows of A and columns of B, because the remaining ones
            are zero (see `redraw_adapters`); None writes all.
        Raises ValueError for a model without LoRA adapters or without a state-dict adapter.
        """
        model, adapter = self.adapters, self.require_adapter()
        dropout = model.require_lora("save_peft").dropout
        has_value_head = getattr(getattr(adapter, "model_args", None), "value_head", False)
        options = PeftOptions(base_model or model.base_name, dropout, has_value_head, rank)
        with self._written_to(path, f"The adapters in {path} could not be written") as folder:
            save_peft(folder, model.model, model.whole(), model.trained, adapter, options)

    @torch.no_grad()
    def load_peft(self, path: str) -> None:
        """Read the adapters from a folder in PEFT's format. Collective; raises as `save_peft` does."""
        model = self.adapters
        model.require_lora("load_peft")
        folder = self._fetched(path)
        load_peft(folder, model.model, model.whole(), model.trained, self.require_adapter())

    def _fetched(self, path: str) -> str:
        """Return a local folder with the files of `path`, which may be an address. Collective."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return on_all_ranks(lambda: storage.fetched(path))[rank]

    def maybe_wait_for_staging(self) -> None:
        """Wait until the copies in pinned memory are complete; call before the optimizer's step."""
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
        result = None
        what = f"The checkpoint {self._saver.name_of(checkpoint_id)} could not be written"
        with self._saver.one_error(what, checkpoint_id, self.folder):
            if to_hf:
                self._save_to_hf(state_dict, checkpoint_id)
            else:
                record = self.run_record | self.adapters.own_base(self.model_description)
                result = self._saver.save(state_dict, checkpoint_id, async_mode, record)
        if enable_garbage_collection:
            GarbageCollection.collect("after saving a checkpoint")
        return result

    def _should_save(self, curr_step: int, last_step: bool) -> bool:
        if not self.enable or self.load_only:
            return False
        is_wanted_first_step = curr_step == 1 and self.enable_first_step_checkpoint
        return last_step or is_wanted_first_step or curr_step % self.interval == 0

    def is_peft_due(self, curr_step: int, last_step: bool) -> bool:
        """True if `save` writes the adapters of this step in PEFT's format."""
        if not self.enable or self.load_only:
            return False
        interval = self.save_peft_interval
        return (last_step and self.last_save_peft) or (interval > 0 and curr_step % interval == 0)

    def _purge(self) -> None:
        if self.enable and self.keep_latest_k > 0 and is_rank_zero():
            self._retention.purge(self.folder, self.keep_latest_k, self._saver.folder)

    @torch.no_grad()
    def load(self, step: int = -1, *, path: str | None = None, model_only: bool = False) -> bool:
        """Load a checkpoint; return False if there is none. Collective.

        step: a step in this run's folder. -1: the newest complete step, or the configured initial
            checkpoint if the folder has none or `checkpoint.enable` is false.
        path: a folder with DCP or Hugging Face files to load instead.
        model_only: load only the weights; optimizer, schedule, step and data position stay.

        Raises FileNotFoundError or ValueError if the named checkpoint is missing, is damaged, or
        belongs to another model, RunError if its tensors cannot be read.
        """
        if path is not None and step != -1:
            raise ValueError(f"load() got step {step} and path {path!r}; give one of them")
        wanted = without_excluded(self.states, self.exclude_from_loading)
        self._saver.wait(self.folder)
        facts = self._choose(step, path)
        if facts is None:
            if self.enable:
                logger.info(f"No checkpoint to load in {self.folder}: starting from scratch")
            self._load_first_adapters()
            return False
        if self.untrained_weights == "copy" and not self.load_only:
            self._base_of_untrained()  # download now, so that exports need not wait
        is_initial = path is None and facts.step < 0
        if facts.is_hf and not model_only and not is_initial:
            logger.warning(
                f"{facts.path} holds weights only, in Hugging Face format: {WEIGHTS_ONLY}"
            )
        if is_initial:
            model_only = model_only or self.initial_load_model_only
        if model_only or facts.is_hf or facts.step == 0:
            wanted = {MODEL: self.states[MODEL]}
        if not (self.has_adapters and facts.has_adapters):
            self._read(facts, wanted, self.states[MODEL].base())
            self.adapters.set_base(facts.path)
            self._load_first_adapters()
            return True
        if path is None and (base := self._initial_checkpoint()) is not None:
            self._read(base, {MODEL: self.states[MODEL]}, self.states[MODEL].base())
            self.adapters.set_base(base.path)
        self._read(facts, wanted, self.states[MODEL].state_dict(), of_adapters=True)
        return True

    def _load_first_adapters(self) -> None:
        if self.lora is not None and self.lora.adapter_path:
            self.load_peft(self.lora.adapter_path)

    def _choose(self, step: int, path: str | None) -> Facts | None:
        if path is not None:
            self._retention.leave_alone(path)
            return at_path(os.fspath(path), "load(path=...)", self.verify_on_load)
        if not self.enable:
            return self._initial_checkpoint()
        facts = self._selection.step(self.folder, step, self.verify_on_load)
        if facts is None:
            return self._initial_checkpoint()
        has_initial = self.initial_load_path or self.initial_load_in_hf
        if has_initial and not self.has_adapters:  # adapters need the initial checkpoint as base
            logger.warning(
                f"This run continues from {facts.path}; checkpoint.initial_load_path and "
                "initial_load_in_hf are ignored. Use another checkpoint.folder to start again"
            )
        self._upload_if_missing(facts)
        return facts

    def _upload_if_missing(self, facts: Facts | None) -> None:
        """Upload a step of this run's folder whose upload was interrupted. Collective."""
        if not self.bucket or self.load_only or facts is None or storage.is_address(facts.path):
            return
        address = storage.join(self.bucket, f"step-{facts.step}")
        if from_rank_zero(lambda: _differ(facts.path, address)):
            self._saver.prepare(AsyncMode.DISABLED)
            self._retention.will_write(address, warns=False)
            self._saver.follow(None, facts.path, self._upload(facts.path, address))

    def _initial_checkpoint(self) -> Facts | None:
        in_hf, path = self.initial_load_in_hf, self.initial_load_path
        key = "checkpoint.initial_load_path"
        if not path and in_hf:
            path, key = self.require_adapter().hf_assets_path, "model.hf_assets_path"
            if not path:
                raise ValueError(
                    "checkpoint.initial_load_in_hf needs checkpoint.initial_load_path or "
                    "model.hf_assets_path, a folder with safetensors files; neither is set"
                )
        return at_path(path, key, self.verify_on_load, in_hf) if path else None

    def _read(
        self,
        facts: Facts,
        wanted: dict[str, Any],
        entries: dict[str, Any],
        of_adapters: bool = False,
    ) -> None:
        """Load the states `wanted`; of_adapters: also check the adapters' base model. Collective."""
        path = facts.path
        logger.info(f"Loading the checkpoint {path}")
        start = time.monotonic()
        others = {name: state for name, state in wanted.items() if name != MODEL}
        states = others | (entries if MODEL in wanted else {})
        if facts.shapes is not None:
            states = fit_to_checkpoint(
                states, self.states, entries.keys(), facts.shapes, path, self.model_description
            )
        if of_adapters:
            self.adapters.check_same_base(facts.record, path, self.model_description)
        if OPTIMIZER in states or DATALOADER in states:  # a resume, not only a load of weights
            compare_with_saved(facts.record, self.run_record, path, states, self.allow_changed)
        is_quantized = self.initial_load_in_hf_quantized and facts.step < 0
        self.dcp_load(states, path, facts.is_hf, facts.is_hf and is_quantized)
        for name, state in others.items():
            if states.get(name, state) is not state:  # DCP filled a dict of the state's contents
                state.load_state_dict(states[name])
        GarbageCollection.collect("after loading a checkpoint")
        logger.info(f"Loaded {path} in {time.monotonic() - start:.2f} s")

    @torch.no_grad()
    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load the folder `checkpoint_id` into `state_dict` and the model."""
        if from_hf:
            if any(map(tied_copies.holds_second, self.states[MODEL].model)):
                # HF files hold tied weights once, under the embedding's name.
                state_dict = {tied_copies.FIRST: state_dict[tied_copies.SECOND]} | state_dict
            state_dict = load_from_hf(
                state_dict,
                self.require_adapter(),
                self._fetched(checkpoint_id),
                from_quantized,
                self.model_description,
                self.chosen_args,
                self.untrained_weights,
            )
        else:
            with dcp.one_error(f"The checkpoint {checkpoint_id} could not be read"):
                dcp.load(state_dict, checkpoint_id=checkpoint_id)
        self.states[MODEL].load_state_dict(state_dict)

    def newest_step(self) -> int:
        """Return the newest complete step in this run's folder; -1 if there is none. Collective.

        Raises ValueError if no step is complete and at least one is damaged.
        """
        newest = self.enable and self._selection.newest(self.folder, self.verify_on_load)
        return newest.step if newest else -1

    def finish_upload(self) -> None:
        """Upload the newest step if its upload was interrupted, for a run that loads nothing. Collective."""
        if self.enable:
            self._upload_if_missing(self._selection.newest(self.folder, self.verify_on_load))

    def holds_weights_only(self, step: int) -> bool:
        """True if this step of the run's folder has weights but no training state. Collective."""
        facts = self._selection.facts_of(self.folder, step)
        return facts.holds_weights_only(self.states)

    def _create_checkpoint_id(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def require_adapter(self) -> BaseStateDictAdapter:
        """Return the model's state-dict adapter. Raises ValueError if the model has none."""
        if self.sd_adapter is None:
            raise ValueError(
                f"Checkpoints of {self.model_description} cannot be read or written in Hugging "
                "Face format: its TrainSpec has no state_dict_adapter"
            )
        return self.sd_adapter

    def claim_folder(self) -> None:
        """Lock the checkpoint folder (`Retention.claim`), unless this manager never saves there."""
        if self.enable and not self.load_only:
            self._retention.claim(self.folder)
