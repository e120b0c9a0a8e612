"""The update of a generator's weights: what is sent, and the check that it arrived.

A generator declares what it takes: whole tensors, shards, which need no gathering, or adapters. Every
update has a version, and a digest that the receiver's weights have to match. Weights for our models are
sent under our names, because some buffers have no Hugging Face name. How weights travel is in
`weight_transport`.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.stream import WeightStream, digest_of
from torchtitan.distributed.dtensor import forget_scales, local_shard
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.rl.weight_transport import PolicyWeights


class StaleWeightsError(RuntimeError):
    """The generator's weights are not of the expected version."""


class NoWeightsError(RuntimeError):
    """The generator has no weights yet, or only a part of an update."""


class WeightMismatchError(RuntimeError):
    """The generator's weights differ from the weights that were sent."""


class TakesWeights(Protocol):
    """A receiver of weights, such as `rl.generator.Generator`, which explains these attributes.

    A missing `takes_shards` means False.
    """

    policy_version: int
    weight_names: Literal["shared", "ours", "hf", "adapters"]
    weight_dtype: torch.dtype | None

    def update_weights(self, weights: Any, *, check_digest: bool = True) -> None: ...


class LiveWeights:
    """The weights of each rank's own pipeline stage, not gathered, for a receiver that takes shards.

    `state_dict()`, or iterating over its items, returns tensors under our names, sharded weights as
    DTensors. They are the live parameters, unless they need a cast: read or copy them before
    `update_weights` returns.

    version: as in `PolicyWeights`. digest: `digest_of` this rank's `local_shard`s, computed on
        access; it differs between layouts.
    """

    def __init__(self, engine: TrainingEngine, dtype: torch.dtype | None = None):
        self._stream = WeightStream.from_engine(engine, OurNames(), dtype=dtype)
        self.version = self._stream.version

    def state_dict(self) -> dict[str, Tensor]:
        return self._stream.live_tensors()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.state_dict().items())

    @property
    def digest(self) -> str | None:
        shards = ((name, local_shard(tensor)) for name, tensor in self)
        return digest_of((name, shard) for name, shard in shards if shard is not None)


class AdapterWeights:
    """The adapters, for a receiver that has the base: (name, bytes as uint8 [n]) of PEFT's files.

    version: as in `PolicyWeights`. Iterating is collective over the engine's ranks.
    """

    digest: str | None = None

    def __init__(self, engine: TrainingEngine):
        self._engine, self.version = engine, engine.weights_version

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        folder = from_rank_zero(tempfile.mkdtemp)

        def read() -> dict[str, bytes]:
            files = {entry.name: Path(entry).read_bytes() for entry in os.scandir(folder)}
            shutil.rmtree(folder)
            return files

        self._engine.save_peft(folder)
        for name, content in from_rank_zero(read).items():
            yield name, torch.frombuffer(bytearray(content), dtype=torch.uint8)


class OurNames(BaseStateDictAdapter):
    """Keeps every name and tensor of any model."""

    def __init__(self) -> None: ...

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    from_hf = to_hf

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        return [[name] for name in names]

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        raise NotImplementedError("weights under our own names are not read from files")


def weights_for(generator: TakesWeights, engine: TrainingEngine) -> Any:
    """Return the engine's weights in the form that the generator takes; None if it shares them."""
    dtype, takes_shards = generator.weight_dtype, getattr(generator, "takes_shards", False)
    match generator.weight_names, takes_shards:
        case "hf", _:
            return engine.iter_hf_weights(dtype=dtype, sharded=takes_shards)
        case "ours", True:
            return LiveWeights(engine, dtype)
        case "ours", False:
            return WeightStream.from_engine(engine, OurNames(), dtype=dtype)
        case "adapters", _:
            return AdapterWeights(engine)
    return None


@torch.no_grad()
def copy_weights(weights: PolicyWeights, model: nn.Module, *, check_digest: bool = True) -> None:
    """Overwrite the model's parameters and saved buffers with weights under our names.

    check_digest: afterwards compare the model's weights with the sent weights, bit for bit.
    Raises WeightMismatchError if they differ, or names are missing or unknown.
    """
    targets = model.state_dict()
    received = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            there = "nothing" if target is None else f"{target.dtype} of {list(target.shape)}"
            raise WeightMismatchError(
                f"{name} was sent as {tensor.dtype} of {list(tensor.shape)}, and the generator's "
                f"model has {there} of this name; give both the same model.flavor, and send weights "
                "in the generator's dtype"
            )
        target.copy_(tensor)
        received.append(name)
    forget_scales(model.parameters())
    # Tied weights may be sent once, under one of their names.
    filled = {targets[name].data_ptr() for name in received}
    missing = [name for name, target in targets.items() if target.data_ptr() not in filled]
    if missing:
        raise WeightMismatchError(
            f"version {weights.version} came without {', '.join(missing)}, which the generator's "
            "model has; give both the same model.flavor"
        )
    if check_digest:
        digest = digest_of((name, targets[name]) for name in received)
        if digest != weights.digest:
            raise WeightMismatchError(
                f"the generator's weights have the digest {digest[:16]}, and the sent weights of "
                f"version {weights.version} have {str(weights.digest)[:16]}; something overwrote "
                "them on the way"
            )


@dataclass(frozen=True)
class WeightSync:
    """Sends the engine's weights to a generator.

    check_digest: see `copy_weights`; costs a second read of all weights.
    """

    engine: TrainingEngine
    generator: TakesWeights
    check_digest: bool = True

    def update(self) -> int:
        """Send the current weights to the generator; return their version. Collective.

        Raises WeightMismatchError on all ranks if any rank received different weights,
        StaleWeightsError if the generator has another version afterwards.
        """
        weights, failure = weights_for(self.generator, self.engine), None
        try:
            self.generator.update_weights(weights, check_digest=self.check_digest)
        except WeightMismatchError as error:
            failure = str(error)
        texts = all_ranks(failure) if self._any_rank(failure is not None) else []
        for rank, text in enumerate(texts):
            if text is not None:
                raise WeightMismatchError(f"rank {rank}: {text}")
        version = self.engine.weights_version
        if self.generator.policy_version != version:
            raise StaleWeightsError(
                f"the generator has version {self.generator.policy_version} after an update to "
                f"version {version}; its update_weights must set policy_version"
            )
        return version

    def _any_rank(self, failed: bool) -> bool:
        """Return True if any rank failed. A sum takes a fifth of the time of gathering texts."""
        if not dist.is_initialized():
            return failed
        num_failed = torch.tensor(float(failed), device=self.engine.device)
        dist.all_reduce(num_failed)
        return bool(num_failed)
