"""Transport of weight updates: copies, buckets, deltas ("changes"), and broadcasts by gloo.

`weight_sync` decides what is sent. Member 0 of a group sends, and the other
members receive.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan.checkpoint.stream import bytes_of, fingerprint
from torchtitan.tools.errors import RunError

_BUCKET_BYTES = 64 * 2**20

Pairs = Iterable[tuple[str, Tensor]]


class PolicyWeights(Protocol):
    """Iterates over (name, tensor) of all weights. To keep a tensor, copy it: its memory may change later.

    version: the engine's `weights_version`. digest: known after the last tensor.
    """

    version: int
    digest: str | None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


def hand_over(
    weights: PolicyWeights, take: Callable[[Iterator[tuple[str, Tensor]]], Any]
) -> Exception | None:
    """Let `take` read weights, then read the rest of the weights, because gathering weights is collective.

    Returns the exception that `take` raised, so the caller can tell the other ranks. If the iteration over
    the weights raises, `hand_over` raises too, because every rank gets this exception.
    """
    pairs, weights_failed = iter(weights), False

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal weights_failed
        try:
            # If `take` stops early, this generator closes. Without `chain`, it would also close `pairs`.
            yield from chain(pairs)
        except Exception:
            weights_failed = True
            raise

    failure = None
    try:
        take(watched())
    except Exception as error:
        # `take` may raise any exception of a file system, a server or an engine.
        if weights_failed:
            raise
        failure = error
    for _ in pairs:
        pass
    return failure


def copied(pairs: Pairs, device: torch.device | None) -> Iterator[tuple[str, Tensor]]:
    """Yield contiguous copies on `device`; None keeps each tensor's device."""
    for name, tensor in pairs:
        yield name, tensor.detach().to(device or tensor.device, copy=True).contiguous()


class StagedWeights:
    """A copy of weights that can be read once, later; reading frees its memory."""

    def __init__(
        self, weights: PolicyWeights, pairs: Pairs | None = None, device: torch.device | None = None
    ):
        self._pairs = deque(copied(weights if pairs is None else pairs, device))
        self.version, self.digest = weights.version, weights.digest
        self._is_read = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_read:
            raise RunError(
                f"version {self.version} of the weights was read by an update that failed; see its error"
            )
        self._is_read = True
        while self._pairs:
            yield self._pairs.popleft()


def buckets_of(pairs: Pairs, n_bytes: int | None = None) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (name, tensor) of at least `n_bytes`, by default 64 MiB; the last may be smaller."""
    bucket: list[tuple[str, Tensor]] = []
    for pair in pairs:
        bucket.append(pair)
        if sum(tensor.nbytes for _, tensor in bucket) >= (n_bytes or _BUCKET_BYTES):
            yield bucket
            bucket = []
    if bucket:
        yield bucket


# ---- changes: at the learning rates of RL most weights round to the same bf16 value as before ----

# Prefixes of weight names in transport. Weight names have no spaces.
_WHOLE, _CHANGES = "all of ", "changes of "
# A gap between the indices of two changes is stored in 16 bits.
_LARGEST_GAP = 2**16 - 1


class WeightChanges:
    """Weights of the last update in host memory: the sender packs deltas, a receiver applies them."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def packed(self, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight's changes, or the whole tensor if that is smaller. pairs: made by `copied`."""
        for name, tensor in pairs:
            last, self._last[name] = self._last.get(name), tensor
            changes = None if last is None else _pack(last, tensor)
            yield (_WHOLE + name, tensor) if changes is None else (_CHANGES + name, changes)

    def unpacked(self, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights; the next update overwrites them. Raises RunError if a delta does not fit."""
        for name, tensor in pairs:
            kind = next((kind for kind in (_WHOLE, _CHANGES) if name.startswith(kind)), "")
            name = name.removeprefix(kind)
            if kind == _WHOLE:
                self._last[name] = tensor
            elif kind == _CHANGES and not (name in self._last and _apply(tensor, self._last[name])):
                raise RunError(
                    f"got only the changes of {name} since the previous update, which this receiver does not "
                    "have; start the trainer again, which then sends whole weights"
                )
            yield name, self._last[name] if kind else tensor


def _words(tensor: Tensor) -> np.ndarray:
    """Return a view of a tensor's values as unsigned integers [n], so that NaN equals itself."""
    return bytes_of(tensor).numpy().view(f"u{tensor.itemsize}")


def _pack(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the changes as uint8 [n], or None if they are no smaller than the tensor.

    The bytes are the new tensor's fingerprint (8 bytes), the gap in indices before each change (2 bytes
    each), and the new values. Every 65,535th value counts as changed, so that gaps fit in 2 bytes.
    """
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return None
    before, after = _words(old), _words(new)
    is_changed = before != after
    is_changed[::_LARGEST_GAP] = True
    if 8 + np.count_nonzero(is_changed) * (2 + new.itemsize) >= new.nbytes:
        return None
    places = np.flatnonzero(is_changed)
    gaps = np.diff(places, prepend=0).astype(np.uint16)
    parts = [np.array([fingerprint(new).item()], np.int64), gaps, after[places]]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def _apply(changes: Tensor, tensor: Tensor) -> bool:
    """Write changes into the tensor of the last update; return False if the fingerprint differs."""
    words, (head, rest) = _words(tensor), np.split(changes.numpy(), [8])
    n_changes, n_left = divmod(len(rest), 2 + tensor.itemsize)
    places = np.cumsum(rest[: 2 * n_changes].view(np.uint16), dtype=np.int64)
    if n_left or places.max(initial=0) >= len(words):
        return False
    words[places] = rest[2 * n_changes :].view(words.dtype)
    return fingerprint(tensor).item() == head.view(np.int64)[0]


# ---- gloo ----


def pickled(value: Any) -> tuple[Tensor, Tensor]:
    """Return the two tensors to send for an object: the number of bytes, and the bytes."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def unpickled(receive: Callable[[Tensor], Any]) -> Any:
    """Return an object that was sent as `pickled`. receive: starts to fill a tensor and returns a handle."""
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
    return unpickled(lambda tensor: group.broadcast(tensor, 0))


def send_weights(weights: PolicyWeights, group: Any, changes: WeightChanges | None = None) -> None:
    """Broadcast weights made by `copied`; the other members read them with `ReceivedWeights`.

    changes: sends deltas to the last update; None sends whole weights.
    """
    for bucket in buckets_of(weights if changes is None else changes.packed(weights)):
        broadcast_object(group, [(name, tensor.shape, tensor.dtype) for name, tensor in bucket])
        for work in [group.broadcast(bytes_of(tensor), 0) for _, tensor in bucket]:
            work.wait()
    broadcast_object(group, {"version": weights.version, "digest": weights.digest})


@dataclass
class ReceivedWeights:
    """Weights that `send_weights` sends, received in host memory; a new object for each update.

    changes: holds the last update's weights, to which deltas are applied; the same object for all updates.
    """

    group: Any
    changes: WeightChanges
    version: int = -1
    digest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.changes.unpacked(self._received())

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        while not isinstance(header := received_object(self.group), dict):
            for name, shape, dtype in header:
                tensor = torch.empty(shape, dtype=dtype)
                self.group.broadcast(bytes_of(tensor), 0).wait()
                yield name, tensor
        self.version, self.digest = header["version"], header["digest"]
