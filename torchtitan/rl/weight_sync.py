"""Giving the policy's weights to generators, and finding stale or damaged ones.

A generator says which weights it takes: whole tensors, or shards, which nothing has to gather. Every
update carries a version, and a digest that the receiver's memory has to match. Weights for
our models are sent under our names, since some buffers have no Hugging Face name.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.stream import WeightStream, digest_of
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.distributed.tensor_views import local_shard
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

_BUCKET_BYTES = 64 * 2**20


class StaleWeightsError(RuntimeError):
    """The generator's weights are not of the version that they should be."""


class NoWeightsError(RuntimeError):
    """The generator has no weights yet, or only a part of an update."""


class WeightMismatchError(RuntimeError):
    """The generator's weights are not those that were sent."""


class PolicyWeights(Protocol):
    """Iterates over (name, tensor) of all weights. Copy the tensors: their memory may change later.

    version: how many optimizer steps made them. digest: known after the last one.
    """

    version: int
    digest: str | None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class TakesWeights(Protocol):
    """What weights are given to, such as a `rl.generator.Generator`; see there.

    `takes_shards` may be missing, which is False.
    """

    policy_version: int
    weight_names: Literal["shared", "ours", "hf"]
    weight_dtype: torch.dtype | None

    def update_weights(self, weights: Any, *, check_digest: bool = True) -> None: ...


class StagedWeights:
    """A copy of weights that waits to be taken over; its memory is given free as it is read.

    It can be read once. version, digest: as of `PolicyWeights`; the digest is known after that.
    failure: what reading them has raised.
    """

    @torch.no_grad()
    def __init__(self, weights: PolicyWeights):
        self._pairs = deque((name, tensor.detach().clone()) for name, tensor in weights)
        self.version, self._digest = weights.version, weights.digest
        self.digest: str | None = None
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while self._pairs:
            yield self._pairs.popleft()
        self.digest = self._digest


class LiveWeights:
    """What each rank holds, as it is, for a receiver that takes shards: nothing is gathered.

    `state_dict()`, or iterating over its items, has our names and DTensors where weights are
    sharded, of the rank's own pipeline stage. They are the live parameters, unless they need a
    cast: read or copy them before `update_weights` returns.

    version: as of `PolicyWeights`. digest: `digest_of` this rank's `local_shard`s, which are read
        when it is asked for; ranks of another layout have others.
    """

    def __init__(self, engine: TrainingEngine, dtype: torch.dtype | None = None):
        self._stream = WeightStream.of_engine(engine, OurNames(), dtype=dtype)
        self.version = self._stream.version

    def state_dict(self) -> dict[str, Tensor]:
        return self._stream.live_tensors()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.state_dict().items())

    @property
    def digest(self) -> str | None:
        shards = ((name, local_shard(tensor)) for name, tensor in self)
        return digest_of((name, shard) for name, shard in shards if shard is not None)


class OurNames(BaseStateDictAdapter):
    """Leaves every name and tensor as it is, for any model."""

    def __init__(self) -> None: ...

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    from_hf = to_hf

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        return [[name] for name in names]

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        raise NotImplementedError("weights under our own names are not read from files")


@torch.no_grad()
def copy_weights(weights: PolicyWeights, model: nn.Module, *, check_digest: bool = True) -> None:
    """Overwrite the model's parameters and saved buffers with weights under our names.

    check_digest: compare what the model then holds with what was sent, bit for bit.
    Raises WeightMismatchError if it differs, or names are missing or unknown.
    """
    targets = model.state_dict()
    received = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            there = "nothing" if target is None else f"{target.dtype} of {list(target.shape)}"
            raise WeightMismatchError(
                f"{name} was sent as {tensor.dtype} of {list(tensor.shape)}, and the generator's "
                f"model has {there} there; give both the same model.flavor, and send weights in "
                "the generator's dtype"
            )
        target.copy_(tensor)
        received.append(name)
    # Tied weights may come once.
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
                f"the generator holds weights of digest {digest[:16]}, and those of version "
                f"{weights.version} that were sent have {str(weights.digest)[:16]}; something "
                "overwrote them on the way"
            )


def hand_over(
    weights: PolicyWeights, take: Callable[[Iterator[tuple[str, Tensor]]], Any]
) -> Exception | None:
    """Let `take` read weights, and read the rest after it: gathering them is collective.

    Returns what `take` raised, so that the other ranks need not wait for this one. What the weights
    themselves raise, they raise on every rank, and here.
    """
    pairs, broken = iter(weights), False

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal broken
        try:
            yield from chain(pairs)  # `chain` keeps `pairs` open when this iteration ends early
        except Exception:
            broken = True
            raise

    failure = None
    try:
        take(watched())
    except Exception as error:  # whatever a file system, a server or an engine may raise
        if broken:
            raise
        failure = error
    for _ in pairs:
        pass
    return failure


# ---- to a generator in the same job ----


@dataclass(frozen=True)
class WeightSync:
    """Gives a generator the engine's weights.

    generator: what takes them. check_digest: see `copy_weights`; reads all weights twice.
    """

    engine: TrainingEngine
    generator: TakesWeights
    check_digest: bool = True

    def update(self) -> int:
        """Give the generator the weights as they are now; return their version. Collective.

        Raises WeightMismatchError on all ranks if any rank got others, StaleWeightsError if the
        generator has another version afterwards.
        """
        engine, dtype = self.engine, self.generator.weight_dtype
        names = self.generator.weight_names
        takes_shards = getattr(self.generator, "takes_shards", False)
        weights: Any = None
        if names == "hf":
            weights = engine.iter_hf_weights(dtype=dtype, sharded=takes_shards)
        elif names == "ours" and takes_shards:
            weights = LiveWeights(engine, dtype)
        elif names == "ours":
            weights = WeightStream.of_engine(engine, OurNames(), dtype=dtype)
        failure = None
        try:
            self.generator.update_weights(weights, check_digest=self.check_digest)
        except WeightMismatchError as error:
            failure = str(error)
        for rank, text in enumerate(all_ranks(failure)):
            if text is not None:
                raise WeightMismatchError(f"rank {rank}: {text}")
        version = engine.weights_version
        if self.generator.policy_version != version:
            raise StaleWeightsError(
                f"the generator says that it has version {self.generator.policy_version} after an "
                f"update to {version}"
            )
        return version


# ---- to a generator on other ranks ----


def send_weights(weights: PolicyWeights, group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcast weights to a group's ranks, which iterate over `ReceivedWeights`.

    source: this rank's number in the group.
    """
    bucket: list[tuple[str, Tensor]] = []

    def send_bucket() -> None:
        header = [(name, tensor.shape, tensor.dtype) for name, tensor in bucket]
        dist.broadcast_object_list([header], group=group, group_src=source)
        for _, tensor in bucket:
            dist.broadcast(tensor.contiguous(), group=group, group_src=source)
        bucket.clear()

    for name, tensor in weights:
        # The stream may reuse the memory for the next tensor.
        bucket.append((name, tensor.detach().clone()))
        if sum(tensor.nbytes for _, tensor in bucket) >= _BUCKET_BYTES:
            send_bucket()
    send_bucket()
    end = {"version": weights.version, "digest": weights.digest}
    dist.broadcast_object_list([end], group=group, group_src=source)


class ReceivedWeights:
    """The weights that another rank sends with `send_weights`, as `PolicyWeights`.

    version: -1 until the last one.
    """

    def __init__(self, group: dist.ProcessGroup | None, source: int, device: torch.device):
        self._group, self._source, self._device = group, source, device
        self.version = -1
        self.digest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, group=self._group, group_src=self._source)
            (header,) = received
            if isinstance(header, dict):
                self.version, self.digest = header["version"], header["digest"]
                return
            for name, shape, dtype in header:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                dist.broadcast(tensor, group=self._group, group_src=self._source)
                yield name, tensor
