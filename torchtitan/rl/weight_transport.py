"""How an update of weights travels: staged in host memory, and broadcast by gloo, whole or as changes.

What is sent, and the update itself, are in `weight_sync`; `weight_changes` packs changes. Member 0 of
a group sends, and the other members receive.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.rl.weight_changes import WeightChanges, bytes_of

_BUCKET_BYTES = 64 * 2**20

Pairs = Iterable[tuple[str, Tensor]]


class PolicyWeights(Protocol):
    """Iterates over (name, tensor) of all weights. Copy the tensors: their memory may change later.

    version: the engine's `weights_version`. digest: known after the last tensor.
    """

    version: int
    digest: str | None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


def hand_over(
    weights: PolicyWeights, take: Callable[[Iterator[tuple[str, Tensor]]], Any]
) -> Exception | None:
    """Let `take` read weights, then read the rest of them, because gathering them is collective.

    Returns an exception that `take` raised, so that the caller can tell the other ranks. An
    exception of the weights themselves, which every rank has, is raised.
    """
    pairs, weights_failed = iter(weights), False

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal weights_failed
        try:
            yield from chain(pairs)  # `chain` keeps `pairs` open when this iteration ends early
        except Exception:
            weights_failed = True
            raise

    failure = None
    try:
        take(watched())
    except Exception as error:  # of a file system, a server or an engine
        if weights_failed:
            raise
        failure = error
    for _ in pairs:
        pass
    return failure


# ---- copies ----


def copied(pairs: Pairs, device: torch.device | None) -> Iterator[tuple[str, Tensor]]:
    """Yield contiguous copies, which stay when the memory of the weights changes.

    device: of the copies; None keeps the tensors'.
    """
    for name, tensor in pairs:
        yield name, tensor.detach().to(device or tensor.device, copy=True).contiguous()


class StagedWeights:
    """A copy of weights that can be read once, later; reading frees its memory.

    pairs: an iteration over `weights`; None begins one. device: of the copy; None keeps the tensors'.
    version, digest: as in `PolicyWeights`. failure: the exception that taking the weights over
    raised.
    """

    def __init__(
        self, weights: PolicyWeights, pairs: Pairs | None = None, device: torch.device | None = None
    ):
        self._pairs = deque(copied(weights if pairs is None else pairs, device))
        self.version, self._digest = weights.version, weights.digest
        self.digest: str | None = None
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while self._pairs:
            yield self._pairs.popleft()
        self.digest = self._digest


def buckets_of(pairs: Pairs) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (name, tensor) of 64 MiB or little more."""
    bucket: list[tuple[str, Tensor]] = []
    for pair in pairs:
        bucket.append(pair)
        if sum(tensor.nbytes for _, tensor in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


# ---- gloo ----


def gloo_group(store: dist.Store, member: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of members that need not share a default process group."""
    return dist.distributed_c10d.ProcessGroupGloo(store, member, size, timeout)


def pickled(value: Any) -> tuple[Tensor, Tensor]:
    """Return the two tensors to send for an object: the number of bytes, and the bytes."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def unpickled(receive: Callable[[Tensor], Any]) -> Any:
    """Return an object that was sent as `pickled`. receive: begins to fill a tensor."""
    length = torch.zeros(1, dtype=torch.int64)
    receive(length).wait()
    data = torch.empty(int(length), dtype=torch.uint8)
    receive(data).wait()
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(group: Any, value: Any) -> None:
    """Send an object from member 0; the other members call `received_object`."""
    for tensor in pickled(value):
        group.broadcast(tensor, 0).wait()


def received_object(group: Any) -> Any:
    """Return the object of member 0's `broadcast_object`."""
    return unpickled(lambda tensor: group.broadcast(tensor, 0))


def send_weights(weights: PolicyWeights, group: Any, changes: WeightChanges | None = None) -> None:
    """Broadcast weights to the members that iterate over `ReceivedWeights`.

    weights: contiguous tensors in host memory, which must not change meanwhile.
    changes: packs the weights; None sends them whole.
    """
    for bucket in buckets_of(weights if changes is None else changes.packed(weights)):
        broadcast_object(group, [(name, tensor.shape, tensor.dtype) for name, tensor in bucket])
        for work in [group.broadcast(bytes_of(tensor), 0) for _, tensor in bucket]:
            work.wait()
    broadcast_object(group, {"version": weights.version, "digest": weights.digest})


class ReceivedWeights:
    """The weights that member 0 sends with `send_weights`, as `PolicyWeights` in host memory.

    changes: unpacks weights that were packed; a receiver has one for all updates.
    version: -1 until the last tensor was read.
    """

    def __init__(self, group: Any, changes: WeightChanges | None = None):
        self._group, self._changes = group, changes or WeightChanges()
        self.version = -1
        self.digest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._changes.unpacked(self._received())

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        while not isinstance(header := received_object(self._group), dict):
            for name, shape, dtype in header:
                tensor = torch.empty(shape, dtype=dtype)
                self._group.broadcast(bytes_of(tensor), 0).wait()
                yield name, tensor
        self.version, self.digest = header["version"], header["digest"]
