"""The model's weights in a checkpoint: all of them, or the adapters beside a base model.

Checkpoints of adapters name their base model and do not hold it. Its digest covers every frozen
parameter, bit for bit, and is the same on every layout of ranks.
"""

import hashlib
import os
from collections.abc import Mapping
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
from torchtitan.checkpoint.folder import mark_base
from torchtitan.checkpoint.stream import fingerprint
from torchtitan.config.job_config import LoRA
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_parts import name_without_wrappers

NAME, DIGEST = "base model", "base model's digest"  # entries of the run's record


class ModelWrapper(Stateful):
    """The parameters and persistent buffers of all model parts, as one state dict.

    `state_dict()` returns the live parameters, which are collected at each call, because a client
    may have moved them. lora: the settings of the adapters, if the model has some; `state_dict()`
    then returns only what trains beside the frozen base.
    """

    def __init__(self, model: nn.Module | list[nn.Module], lora: LoRA | None = None) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self._lora = lora
        self.in_adapters = adapter_names(adapted_weights(self.model))
        self.trained = [
            name_without_wrappers(name)
            for part in self.model
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]
        self.base_name: str | None = None  # None: initial weights
        self._base_record: dict[str, str] | None = None

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
        return whole if self._lora is None else {name: whole[name] for name in self.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each part's entries. A part skips the entries of other parts."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))

    # ---- adapters and their base ----

    def require_lora(self, wanted_by: str) -> LoRA:
        if self._lora is None:
            raise ValueError(
                f"{wanted_by} needs a model with adapters, and this one has none; build it with "
                "model.converters = ['lora']"
            )
        return self._lora

    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the model's entries with adapters merged; see `lora.merged`."""
        return self.whole() if self._lora is None else merged(self.whole(), self.model, dtype)

    def off(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.adapters_off`."""
        self.require_lora("adapters_off")
        if changed := [name for name in self.trained if name not in self.in_adapters]:
            raise ValueError(
                f"adapters_off would not give the base model, because {changed[0]} trains whole; "
                "empty lora.also_train"
            )
        return adapters_off(self.model)

    @property
    def are_off(self) -> bool:
        """True in a context of `off`."""
        modules = (module for part in self.model for module in part.modules())
        return self._lora is not None and any(getattr(m, "lora_n_off", 0) for m in modules)

    def base(self) -> dict[str, Any]:
        """Return the entries of the model without its adapters."""
        return {name: x for name, x in self.whole().items() if name not in self.in_adapters}

    def set_base(self, name: str) -> None:
        """name: what the base was read from. Collective."""
        self.base_name, self._base_record = name, None
        if self._lora is not None:
            from_rank_zero(lambda: mark_base(name))

    def own_base(self, model: str) -> dict[str, str]:
        """Return the name and the digest of the base; {} without adapters. Collective.

        model: the base's name if it has its initial weights.
        """
        if self._lora is None:
            return {}
        if self._base_record is None:
            frozen = {
                name: f"{t.dtype} {tuple(t.shape)} {fingerprint(t).item()}"  # gathers one at a time
                for name, t in self.whole().items()
                if name not in self.trained
            }
            lines = {f"{key} {value}" for part in all_ranks(frozen) for key, value in part.items()}
            digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
            name = self.base_name or f"{model} with initial weights"
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
