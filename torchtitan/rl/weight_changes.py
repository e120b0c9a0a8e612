"""Weights as the values that changed since the last update, bit for bit.

At the learning rates of RL most weights round to the same bf16 value as before the step, so an
update of what changed is much smaller than all weights.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from torchtitan.checkpoint.stream import fingerprint
from torchtitan.tools.errors import RunError

# How weights are named on the way. Names of weights have no spaces.
_WHOLE, _CHANGES = "all of ", "changes of "
_BLOCK = 2**16  # values; an index within a block has 16 bits


class WeightChanges:
    """One side's copy of the last update: the sender packs with it, a receiver unpacks.

    It holds all weights that were packed, in host memory.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def packed(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight packed: its changes, or the whole tensor where that is smaller.

        pairs: contiguous tensors on the host that stay as they are, such as `weight_sync.copied`.
        """
        for name, tensor in pairs:
            last, self._last[name] = self._last.get(name), tensor
            changes = None if last is None else _pack(last, tensor)
            yield (_WHOLE + name, tensor) if changes is None else (_CHANGES + name, changes)

    def unpacked(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights; the next update changes their memory.

        pairs: tensors on the host; those without a mark of `packed` pass unchanged. Raises RunError if a result differs from the sender's tensor.
        """
        for name, tensor in pairs:
            kind = next((kind for kind in (_WHOLE, _CHANGES) if name.startswith(kind)), "")
            name = name.removeprefix(kind)
            if kind == _WHOLE:
                self._last[name] = tensor
            elif kind == _CHANGES and not (name in self._last and _apply(tensor, self._last[name])):
                raise RunError(
                    f"an update came with the changes of {name} since the update before, which this "
                    "receiver does not have; start the trainer again, which then sends whole weights"
                )
            yield name, self._last[name] if kind else tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bytes, because gloo does not send every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _words(tensor: Tensor) -> np.ndarray:
    """Return a view of a tensor's values as unsigned integers [n], so that NaN equals itself."""
    return bytes_of(tensor).numpy().view(f"u{tensor.itemsize}")


def _pack(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the changes as uint8 [n], or None if they are no smaller than the tensor.

    They are the new tensor's fingerprint (8 bytes), the number of changes in each block of 65,536
    values (4 bytes), their places in the block (2 bytes each), and the new values.
    """
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return None
    before, after = _words(old), _words(new)
    places, values = [], []
    n_bytes = 8 + 4 * -(-len(after) // _BLOCK)
    for start in range(0, len(after), _BLOCK):
        block = after[start : start + _BLOCK]
        changed = np.flatnonzero(before[start : start + _BLOCK] != block)
        n_bytes += len(changed) * (2 + new.itemsize)
        if n_bytes >= new.nbytes:
            return None
        places.append(changed.astype(np.uint16))
        values.append(block[changed])
    counts = np.array([len(changed) for changed in places], np.uint32)
    parts = [np.array([fingerprint(new).item()], np.int64), counts, *places, *values]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def _apply(changes: Tensor, tensor: Tensor) -> bool:
    """Write changes into the tensor that they were packed against; False if the result differs."""
    words = _words(tensor)
    head, rest = np.split(changes.numpy(), [8 + 4 * -(-len(words) // _BLOCK)])
    ends = np.cumsum(head[8:].view(np.uint32), dtype=np.int64).tolist()
    n_changes = ends[-1] if ends else 0
    if len(rest) != n_changes * (2 + tensor.itemsize):
        return False
    places, values = rest[: 2 * n_changes].view(np.uint16), rest[2 * n_changes :].view(words.dtype)
    for number, (first, end) in enumerate(pairwise([0, *ends])):
        words[number * _BLOCK :][places[first:end]] = values[first:end]
    return fingerprint(tensor).item() == head[:8].view(np.int64)[0]
