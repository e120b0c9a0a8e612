"""Translates a model's state dict to the names and layouts of Hugging Face, and back."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from torchtitan.distributed.dtensor import LocalShard
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.files import read_json_object
from torchtitan.tools.logging import logger

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NAMES_SHOWN = 5
# Part of the names of linear attention's A_log and dt_bias, which exports keep in fp32.
DECAY = ".decay."


def to_template(name: str) -> tuple[str, list[str]]:
    """Return (the name with `{}` in place of each number, these numbers)."""
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)


def shorten(names: list[str]) -> str:
    """Return a string of the first names and the number of the omitted names."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


class BaseStateDictAdapter(ABC):
    """Translates a model family's state dicts from and to Hugging Face files, for the checkpoint manager.

    fqn_to_index_mapping: HF tensor name -> number (from 1) of its file in an export; None: an export
        is split into files by size.
    hf_assets_path: folder with the model's Hugging Face files, or None.
    """

    fqn_to_index_mapping: dict[str, int] | None
    hf_assets_path: str | None

    @abstractmethod
    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None) -> None: ...

    @abstractmethod
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return HF name -> tensor; the tensors may be views of `state_dict` or copies."""

    @abstractmethod
    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our name -> tensor: the inverse of `to_hf`."""

    @abstractmethod
    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        """Return a DCP reader (HuggingFaceStorageReader) of the safetensors files in `path`."""

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        """Split our names (those with an HF name) into groups that `to_hf` can translate separately."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return list(groups.values())

    def keeps_dtype(self, name: str) -> bool:
        """True if a weight stream must not round the tensor: a router, or the decay of linear attention."""
        return ".router." in name or DECAY in name

    def hf_aliases(self) -> dict[str, str]:
        """Return HF name -> alias, the HF name of a tied tensor for which `to_hf` writes nothing."""
        return {}

    def shards_to_hf(self, name: str, shard: LocalShard) -> Iterable[tuple[str, LocalShard]]:
        """Return (HF name, shard) pairs for one shard of our tensor: views, without communication."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot translate single shards; stream whole tensors "
            "(sharded=False), or give it a method shards_to_hf"
        )

    def spelled_like(self, hf_names: Collection[str]) -> "BaseStateDictAdapter":
        """Return an adapter that uses the names in `hf_names`, if the family has several naming schemes."""
        return self

    def for_export(self, base_names: Collection[str]) -> "BaseStateDictAdapter":
        """Return an adapter that uses the tensor names of an export.

        base_names: names of the tensors in the base model's files, if the export copies parts of these files
            that are not trained; else empty.
        """
        return self

    def ignores_hf_key(self, hf_key: str) -> bool:
        """True if loading skips this tensor. Loading fails for other tensors that the model lacks."""
        return False

    def holds_untrained_part(self, hf_key: str) -> bool:
        """True if `hf_key`, which loading skips, is a weight of a part that our model lacks."""
        return False


class StateDictAdapter(BaseStateDictAdapter):
    """An adapter that reads `fqn_to_index_mapping` from the index in `hf_assets_path`.

    A subclass has a table `from_hf_map`: HF name with `{}` for each number -> our name, or None if
    loading ignores the tensor.
    """

    from_hf_map: dict[str, Any]

    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None) -> None:
        self.model_args = model_args
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping = None
        if hf_assets_path is None:
            return
        path = os.path.join(hf_assets_path, "model.safetensors.index.json")
        try:
            weight_map = read_weight_map(path)
        except FileNotFoundError:
            logger.debug(f"There is no {path}: a Hugging Face export is split into files by size")
            return
        self.fqn_to_index_mapping = {}
        for name, shard in weight_map.items():
            if (match := re.search(r"(?<!\d)\d{1,9}(?!\d)", shard)) is None:
                raise ValueError(f"{path}: expected a number in the shard's name, got {shard!r}")
            self.fqn_to_index_mapping[name] = int(match.group())

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        # Imported here, because only checkpoints need DCP.
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        if from_quantized:
            logger.warning(
                "checkpoint.initial_load_in_hf_quantized has no effect for this model family: "
                "its weights are read as they are stored"
            )
        return HuggingFaceStorageReader(path)

    def ignores_hf_key(self, hf_key: str) -> bool:
        table = getattr(self, "from_hf_map", {})
        return table.get(hf_key, table.get(to_template(hf_key)[0], hf_key)) is None


def read_weight_map(path: str) -> dict[str, str]:
    """Return tensor name -> file name, from a model.safetensors.index.json.

    Raises FileNotFoundError; ValueError for invalid content, or a file name outside the index's folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} is not a safetensors index: it has no table 'weight_map'")
    for tensor, name in weight_map.items():
        is_plain = isinstance(name, str) and os.path.basename(name) == name and "\0" not in name
        if not is_plain or name in ("", ".", ".."):
            raise ValueError(
                f"{path} names a file that is not beside it, for {tensor}: {name!r}; an index can "
                "only name files of its own folder"
            )
    return weight_map
