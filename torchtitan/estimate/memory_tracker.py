"""Counts the bytes of live tensors by kind: parameters, gradients, optimizer state, other.

Works on real and on fake tensors; fake tensors have a size but no memory. Counts only what torch
allocates for tensors, without scratch memory of kernels and rounding of the allocator.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan.numerics.delta_rule import scratch_bytes
from torchtitan.numerics.nf4 import num_numbers

PARAMETERS = "parameters and buffers"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
OTHER = "activations and temporaries"

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class OperatorMode(TorchDispatchMode):
    """While active, calls `see` for each operator on plain tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls operators on local tensors, which come here again
        result = func(*args, **(kwargs or {}))
        # Skip the fake tensors with which DTensor infers a shape: no rank allocates them.
        if torch._C._get_dispatch_mode(_FAKE) is None:
            self.see(func, args, kwargs or {}, result)
        return result

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        raise NotImplementedError


class MemoryTracker(OperatorMode):
    """While active, counts each storage on `device_type` that an operator returns, until it is freed.

    live: current bytes, by kind. peak: `live` when its sum was largest since `reset_peak`.
    most: the peak of each kind since `reset_peak`; the kinds may peak at different times.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.live: Counter[str] = Counter()
        # storage -> [bytes, kind]; storages are compared by identity and held weakly.
        self._storages = WeakIdKeyDictionary(ref_type=weakref.ref)
        self.reset_peak()

    def reset_peak(self) -> None:
        self.peak = Counter(self.live)
        self.most = Counter(self.live)

    def mark(self, tensors: Iterable[Any], kind: str) -> None:
        """Count the storages of these tensors as `kind`, even if they were counted as another kind."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), kind)

    def __enter__(self) -> "MemoryTracker":
        # FSDP frees and allocates gathered parameters with `resize_`, which dispatches no operator.
        resize = self._resize = torch.UntypedStorage.resize_

        @functools.wraps(resize)
        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self.device_type:
                self._count(value.untyped_storage())
        # Add the scratch memory that our own operators allocate and free.
        name = getattr(func, "_opname", "")
        inside = 0
        if name == "nf4_mm" and result.device.type == self.device_type:
            inside = num_numbers(args[1]) * result.itemsize
        elif name.startswith("gated_delta_rule") and result[0].device.type == self.device_type:
            is_backward = name.endswith("backward")
            inside = scratch_bytes(*(args[3:5] if is_backward else args[1:3]), is_backward)
        if inside:
            self.live[OTHER] += inside
            self._update_peak()
            self.live[OTHER] -= inside

    def _count(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        """Update the size of a storage. kind: its new kind; None keeps its kind."""
        entry = self._storages.get(storage)
        if entry is None:
            entry = self._storages[storage] = [0, OTHER]
            weakref.finalize(storage, self._forget, entry)
        self._forget(entry)
        entry[0] = storage.nbytes()
        entry[1] = kind or entry[1]
        self.live[entry[1]] += entry[0]
        self._update_peak()

    def _forget(self, entry: list[Any]) -> None:
        self.live[entry[1]] -= entry[0]
        entry[0] = 0

    def _update_peak(self) -> None:
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)
        for kind, size in self.live.items():
            if size > self.most[kind]:
                self.most[kind] = size
