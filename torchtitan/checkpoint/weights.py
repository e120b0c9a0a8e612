"""The model's weights in a checkpoint: all of them, or the adapters beside a base model.

Checkpoints of adapters name their base model and do not hold it. Its digest covers every frozen
parameter, bit for bit, and is the same on every layout of ranks.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.adapters.lora import adapted_weights, adapter_names, adapters_off, merged
from torchtitan.adapters.peft_files import PeftOptions, load_peft, save_peft
from torchtitan.checkpoint.folder import mark_base
from torchtitan.checkpoint.stream import fingerprint
from torchtitan.config.job_config import LoRA
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_parts import name_without_wrappers

NAME, DIGEST = "base model", "base model's digest"  # entries of the run's record


class ModelWrapper(Stateful):
    """The parameters and persistent buffers of all model parts, as one state dict.

    `state_dict()` returns the live parameters, not copies. They are collected at each call, because
    a client may have moved parameters, or exchanged their memory, since the last one.

    has_adapters: the parts have adapters beside frozen weights. `state_dict()` then returns only
        what trains.
    """

    def __init__(self, model: nn.Module | list[nn.Module], has_adapters: bool = False) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.has_adapters = has_adapters
        self.adapted = list(adapted_weights(self.model))
        self.trained = [
            name_without_wrappers(name)
            for part in self.model
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]

    def whole(self) -> dict[str, Any]:
        """Return all entries: the base model's and the adapters'."""
        entries: dict[str, Any] = {}
        for part in self.model:
            reshard_model(part)  # FSDP holds gathered parameters after an evaluation
            entries |= get_model_state_dict(part)
        return entries

    cache_state_dict = property(whole)  # its name in 0.2.x

    def state_dict(self) -> dict[str, Any]:
        whole = self.whole()
        return {name: whole[name] for name in self.trained} if self.has_adapters else whole

    def base(self) -> dict[str, Any]:
        """Return the entries of the model without its adapters."""
        of_adapters = adapter_names(self.adapted)
        return {name: entry for name, entry in self.whole().items() if name not in of_adapters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each part's entries. A part skips the entries of other parts."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


class AdapterFiles:
    """Reads and writes a model's adapters in PEFT's format, and knows the base beside them.

    options: None for a model without adapters; `save`, `load` and `off` then raise ValueError.
    adapter, in the methods: translates names to those of Hugging Face's model.
    """

    def __init__(self, model: ModelWrapper, options: LoRA | None) -> None:
        self._model, self._options = model, options
        self._base_name: str | None = None  # None: initial weights
        self._base_record: dict[str, str] | None = None

    @torch.no_grad()
    def save(
        self,
        path: str,
        adapter: BaseStateDictAdapter,
        base_model: str | None = None,
        rank: int | None = None,
    ) -> None:
        """Write the adapters to the folder `path` in PEFT's format. Collective.

        base_model: the name or folder of the base; None is the one that was loaded.
        rank: beyond which all adapters are zero (`redraw_adapters`) and nothing is written; None
            writes all.
        """
        model, options = self._model, self._require_options("save_peft")
        has_value_head = getattr(getattr(adapter, "model_args", None), "value_head", False)
        base_model = base_model or self._base_name
        peft = PeftOptions(base_model, options.dropout, has_value_head, rank)
        save_peft(path, model.model, model.whole(), model.trained, adapter, peft)

    @torch.no_grad()
    def load(self, path: str, adapter: BaseStateDictAdapter) -> None:
        """Read the adapters from a folder in PEFT's format. Collective; see `adapters.peft_files`."""
        model, _ = self._model, self._require_options("load_peft")
        load_peft(path, model.model, model.whole(), model.trained, adapter)

    def load_first(self, require_adapter: Callable[[], BaseStateDictAdapter]) -> None:
        """Read the adapters that training starts from, if the job names some."""
        if self._options is not None and self._options.adapter_path:
            self.load(self._options.adapter_path, require_adapter())

    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the model's entries with adapters merged; see `lora.merged`."""
        if self._options is None:
            return self._model.state_dict()
        return merged(self._model.whole(), self._model.model, dtype)

    def off(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.adapters_off`."""
        self._require_options("adapters_off")
        of_adapters = adapter_names(self._model.adapted)
        if changed := [name for name in self._model.trained if name not in of_adapters]:
            raise ValueError(
                f"adapters_off would not give the base model, because {changed[0]} trains whole; "
                "empty lora.also_train"
            )
        return adapters_off(self._model.model)

    @property
    def are_off(self) -> bool:
        """True in a context of `off`."""
        modules = (module for part in self._model.model for module in part.modules())
        return self._options is not None and any(getattr(m, "lora_n_off", 0) for m in modules)

    def _require_options(self, wanted_by: str) -> LoRA:
        if self._options is None:
            raise ValueError(
                f"{wanted_by} needs a model with adapters, and this one has none; build it with "
                "model.converters = ['lora']"
            )
        return self._options

    # ---- the base ----

    def set_base(self, name: str) -> None:
        """name: what the base was read from. Collective."""
        self._base_name, self._base_record = name, None
        if self._options is not None:
            from_rank_zero(lambda: mark_base(name))

    def own_base(self, model: str) -> dict[str, str]:
        """Return the name and the digest of the base; {} without adapters. Collective.

        model: the base's name if it has its initial weights.
        """
        if self._options is None:
            return {}
        if self._base_record is None:
            frozen = {
                name: f"{t.dtype} {tuple(t.shape)} {fingerprint(t).item()}"  # gathers one at a time
                for name, t in self._model.whole().items()
                if name not in self._model.trained
            }
            lines = {f"{key} {value}" for part in all_ranks(frozen) for key, value in part.items()}
            digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
            name = self._base_name or f"{model} with initial weights"
            self._base_record = {NAME: name, DIGEST: digest}
        return self._base_record

    def check_same_base(self, saved: Mapping[str, Any], path: str, model: str) -> None:
        """Raise ValueError if the adapters of the checkpoint `path` were trained on another base.

        saved: the record in that checkpoint. model: see `own_base`.
        """
        own = self.own_base(model)
        if DIGEST not in saved:
            logger.warning(
                f"{path} does not name the base model of its adapters: it is not compared"
            )
        elif saved[DIGEST] != own[DIGEST]:
            name = str(saved.get(NAME))
            is_gone = os.sep in name and not from_rank_zero(lambda: os.path.exists(name))
            raise ValueError(
                f"The adapters in {path} were trained on another base model, {name}"
                f"{', which does not exist any more' if is_gone else ''} (digest "
                f"{saved[DIGEST]}), got {own[NAME]} (digest {own[DIGEST]}); set "
                "checkpoint.initial_load_path to that base, with the dtypes of that run"
            )
