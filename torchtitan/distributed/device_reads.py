"""What the host reads from the device in a forward pass, without waiting again to recompute it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils.checkpoint import noop_context_fn

T = TypeVar("T")


def read_once(read: Callable[[], T]) -> T:
    """What `read` returns; in the recomputation of a checkpointed block, what it returned in forward.

    Both passes have to make the same calls in the same order. Without `reading_contexts` around
    them every call reads.
    """
    reads = _Reads.current.get()
    return read() if reads is None else reads.take(read)


def reading_contexts(
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
) -> "tuple[_Reads, _Reads]":
    """Contexts for `checkpoint(context_fn=...)`: those of `context_fn`, with `read_once` in force."""
    forward, recompute = context_fn()
    values: list[Any] = []
    return _Reads(values, False, forward), _Reads(values, True, recompute)


class _Reads:
    """The context of a forward pass or of its recomputation; a pair shares `values`."""

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
