"""Exchanging objects between ranks. Every function here except `num_ranks` is collective.

Without a process group this process is the only rank.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(ask: Callable[[], T]) -> T:
    """Call `ask()` on rank 0; return its result, or raise its exception, on every rank.

    For reading a network file system, where some ranks may see a change later than others.
    """
    is_asked = not dist.is_initialized() or dist.get_rank() == 0
    answer = [_result_of(ask) if is_asked else None]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    return _unwrap(answer)[0]


def ranks_of_first_machine() -> int:
    """Return the number of ranks on rank 0's machine, which are the first ranks. Collective."""
    return min(num_ranks(), from_rank_zero(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of the group (by default, all ranks), in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `work()` on every rank; return all results in rank order, or raise the first exception."""
    return _unwrap(all_ranks(_result_of(work), group))


def _result_of(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # `_unwrap` raises it on every rank
        return None, error


def _unwrap(answers: list[Any]) -> list[Any]:
    for _, error in answers:
        if error is not None:
            raise error
    return [result for result, _ in answers]
