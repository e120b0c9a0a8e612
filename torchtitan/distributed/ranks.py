"""What ranks tell each other on the host. Every function here but `num_ranks` is collective.

Without a process group this process is the only rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(ask: Callable[[], T]) -> T:
    """What `ask()` returns or raises on rank 0, on every rank.

    Ranks may see a network file system differently for a while; rank 0's view decides.
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
    """The `value` of every rank, or of those of a group, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """What `work()` returns on every rank, in rank order.

    What it raises on one rank is raised on all, so that no rank waits for one that has stopped.
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
