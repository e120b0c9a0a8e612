"""Reading from the device once per forward pass: recomputation reuses the values read."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils.checkpoint import noop_context_fn

T = TypeVar("T")


def read_once(read: Callable[[], T]) -> T:
    """Return `read()`; when a checkpointed block is recomputed, return the value that its forward read.

    Forward and recomputation must make the same calls in order. Outside `reading_contexts` every call reads.
    """
    reads = _Reads.current.get()
    return read() if reads is None else reads.take(read)


def reading_contexts(
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
) -> "tuple[_Reads, _Reads]":
    """Return `context_fn`'s two contexts with `read_once` enabled, for `checkpoint(context_fn=...)`."""
    forward, recompute = context_fn()
    values: list[Any] = []
    return _Reads(values, False, forward), _Reads(values, True, recompute)


class _Reads:
    """Context manager around `inner`: `read_once` stores values in forward and returns them in recompute."""

    current: ContextVar["_Reads | None"] = ContextVar("reads", default=None)

    def __init__(self, values: list[Any], is_recompute: bool, inner: AbstractContextManager[Any]):
        self.values = values
        self.is_recompute = is_recompute
        self.inner = inner

    def __enter__(self) -> None:
        self.num_taken = 0
        self.inner.__enter__()
        self.token = _Reads.current.set(self)

    def __exit__(self, *error: Any) -> bool | None:
        _Reads.current.reset(self.token)
        return self.inner.__exit__(*error)

    def take(self, read: Callable[[], T]) -> T:
        if not self.is_recompute:
            self.values.append(read())
        self.num_taken += 1
        return self.values[self.num_taken - 1]
