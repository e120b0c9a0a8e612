"""Updates a generator's weights: what is sent, and the check that it arrived.

A generator declares what it takes: whole tensors, shards (which need no all-gather), or adapters. Its
`update_weights` gets the weights with a version and a digest. Generators that run this package's models
use this package's weight names, because some buffers have no Hugging Face name. `weight_transport` moves
the weights.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.stream import WeightStream, digest_of
from torchtitan.distributed.dtensor import LocalShard, forget_scales
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.rl.weight_transport import PolicyWeights


class StaleWeightsError(RuntimeError):
    """The generator's weights are not of the expected version."""


class NoWeightsError(RuntimeError):
    """The generator has no weights yet, or only a part of an update."""


class WeightMismatchError(RuntimeError):
    """The generator's weights differ from those that were sent."""


class TakesWeights(Protocol):
    """A receiver of weights, such as `rl.generator.Generator`.

    policy_version: version of the receiver's weights; -1 before the first update.
    weight_names: naming scheme of the weights to send; "shared" if the receiver uses the trainer's tensors.
    weight_dtype: the dtype to which parameters are cast; None for no cast.
    takes_shards (default False): the generator takes each rank's `LocalShard`s instead of whole tensors.
    """

    policy_version: int
    weight_names: Literal["shared", "ours", "hf", "adapters"]
    weight_dtype: torch.dtype | None

    def update_weights(self, weights: Any, *, check_digest: bool = True) -> None: ...


class AdapterWeights:
    """Iterates over the adapters as PEFT's files: (file name, content as uint8 [n]). Collective."""

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
    """A state-dict adapter that changes no name and no tensor."""

    def __init__(self) -> None: ...

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    from_hf = to_hf

    def shards_to_hf(self, name: str, shard: LocalShard) -> Iterator[tuple[str, LocalShard]]:
        yield name, shard

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        return [[name] for name in names]

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        raise NotImplementedError("weights under our own names are not read from files")


def weights_for(generator: TakesWeights, engine: TrainingEngine) -> Any:
    """Return the engine's weights in the generator's format; None if the generator shares the tensors."""
    dtype, sharded = generator.weight_dtype, getattr(generator, "takes_shards", False)
    match generator.weight_names:
        case "hf":
            return engine.iter_hf_weights(dtype=dtype, sharded=sharded)
        case "ours":
            return WeightStream.from_engine(engine, OurNames(), dtype=dtype, sharded=sharded)
        case "adapters":
            return AdapterWeights(engine)
    return None


@torch.no_grad()
def copy_weights(weights: PolicyWeights, model: nn.Module, *, check_digest: bool = True) -> None:
    """Overwrite the model's parameters and saved buffers with weights under this package's names.

    check_digest: compare the result with the sent weights, bit for bit.
    Raises WeightMismatchError if weights differ, or names are missing or unknown.
    """
    targets = model.state_dict()
    received = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            there = "nothing" if target is None else f"{target.dtype} of {list(target.shape)}"
            raise WeightMismatchError(
                f"{name} was sent as {tensor.dtype} of {list(tensor.shape)}, and the generator's model has "
                f"{there} of this name; give both the same model.flavor and dtype"
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
    digest = digest_of((name, targets[name]) for name in received) if check_digest else None
    if check_digest and digest != weights.digest:
        raise WeightMismatchError(
            f"the generator's weights have the digest {digest}, and the sent weights of version "
            f"{weights.version} have {weights.digest}; something overwrote them on the way"
        )


def push_weights(
    engine: TrainingEngine, generator: TakesWeights, *, check_digest: bool = True
) -> int:
    """Send the engine's weights to a generator; return their version. Collective.

    check_digest: compare digests. This reads all weights a second time.
    Raises WeightMismatchError on all ranks if any rank received different weights, and
    StaleWeightsError if the generator has a different version afterwards.
    """
    failure = None
    try:
        generator.update_weights(weights_for(generator, engine), check_digest=check_digest)
    except WeightMismatchError as error:
        failure = str(error)
    # Gather messages only after a failure, because all-reducing a flag takes a fifth of the time.
    has_failed = failure is not None
    if dist.is_initialized():
        num_failed = torch.tensor(float(has_failed), device=engine.device)
        dist.all_reduce(num_failed)
        has_failed = bool(num_failed)
    for rank, text in enumerate(all_ranks(failure) if has_failed else ()):
        if text is not None:
            raise WeightMismatchError(f"rank {rank}: {text}")
    version = engine.weights_version
    if generator.policy_version != version:
        raise StaleWeightsError(
            f"the generator has version {generator.policy_version} after an update to version {version}; "
            "its update_weights must set policy_version"
        )
    return version
