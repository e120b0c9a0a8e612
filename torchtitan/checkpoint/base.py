"""A model's adapters in files, and their base model, which checkpoints name but do not hold.

The digest covers every frozen parameter, bit for bit, and is the same on every layout of ranks.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchtitan.adapters.lora import adapter_names, adapters_off, merged
from torchtitan.adapters.peft_files import PeftOptions, load_peft, save_peft
from torchtitan.checkpoint.folder import mark_base
from torchtitan.checkpoint.run_record import read_record
from torchtitan.checkpoint.states import ModelWrapper, saved_shapes_in
from torchtitan.checkpoint.stream import fingerprint
from torchtitan.config.job_config import LoRA
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

NAME, DIGEST = "base model", "base model's digest"  # entries of the run's record


def holds_adapters(path: str) -> bool:
    """True if a DCP checkpoint holds adapters, and so not their base."""
    return any(name.endswith(("lora_a", "lora_b")) for name in saved_shapes_in(path) or ())


def base_record(entries: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the name and the digest of the base. Collective; gathers one weight at a time.

    entries: the frozen parameters of this rank's model parts.
    """
    own = {key: f"{t.dtype} {tuple(t.shape)} {fingerprint(t).item()}" for key, t in entries.items()}
    lines = sorted({f"{key} {value}" for part in all_ranks(own) for key, value in part.items()})
    return {NAME: name, DIGEST: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]}


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

    def load_first(
        self, require_adapter: Callable[[], BaseStateDictAdapter], base: str | None = None
    ) -> None:
        """Read the adapters that training starts from, if the job names some.

        base: what the weights were read from, if they were read.
        """
        if base is not None:
            self.set_base(base)
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

    def are_in(self, path: str) -> bool:
        """True if a DCP checkpoint holds adapters of this model, and so not their base. Collective."""
        return self._options is not None and from_rank_zero(lambda: holds_adapters(path))

    def set_base(self, name: str | None) -> None:
        """name: what the base was read from; None: initial weights. Collective."""
        self._base_name, self._base_record = name, None
        if name is not None and self._options is not None:
            from_rank_zero(lambda: mark_base(name))

    def own_base(self, model: str) -> dict[str, str]:
        """Return the record of the base that the adapters stand beside, {} without adapters. Collective.

        model: the base's name if it has its initial weights.
        """
        if self._options is None:
            return {}
        if self._base_record is None:
            name = self._base_name or f"{model} with initial weights"
            self._base_record = base_record(self._model.frozen(), name)
        return self._base_record

    def check_same_base(self, path: str, model: str) -> None:
        """Raise ValueError if the adapters of the checkpoint `path` were trained on another base.

        model: see `own_base`.
        """
        saved, own = from_rank_zero(lambda: read_record(path)), self.own_base(model)
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
