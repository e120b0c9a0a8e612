"""Exchanging objects between ranks. Every function here except `num_ranks` is collective.

Without a process group this process is the only rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(ask: Callable[[], T]) -> T:
    """Call `ask()` on rank 0; return its result, or raise its exception, on every rank.

    For reading a network file system, which ranks may see differently for a while.
    """
    if not dist.is_initialized():
        return ask()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except Exception as error:  # raised below, on every rank
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of the group (by default, all ranks), in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Call `work()` on every rank, and return all results in rank order.

    If it raises on one rank, every rank raises, so that no rank waits for the rank that failed.
    """
    own: tuple[Any, Exception | None]
    try:
        own = work(), None
    except Exception as error:  # raised below, on every rank
        own = None, error
    answers = all_ranks(own)
    if failure := next((error for _, error in answers if error is not None), None):
        raise failure
    return [result for result, _ in answers]
