"""Hooks of torchtitan 0.2.x that a client may override or call.

In 0.2.x a batch is (input_dict, labels). Here the trainer's loop passes `Step`s of `TokenBatch`es;
only a method that a client overrides gets a dict.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from torchtitan.batch.batch import Batch
from torchtitan.data.dataloader import DataloaderExhaustedError
from torchtitan.data.prefetch import Step, StepsAhead


def is_overridden(owner: object, name: str, base: type) -> bool:
    """True if a client replaced the method `name` of `base`, in a subclass or on the object."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


class Batches:
    """Iterator over (input_dict, labels) on the CPU, for `Trainer.batch_generator`.

    The trainer's own loop calls `next_step` instead.
    count: called after each read with (list of the number of labels in each batch, seconds of the read).
    Raises DataloaderExhaustedError at the end of the data.
    """

    def __init__(
        self,
        data: Iterable[tuple[Batch, Tensor]] | StepsAhead,
        count: Callable[[list[int], float], None],
    ):
        self.steps = data if isinstance(data, StepsAhead) else None
        self._items = _items_of(data) if isinstance(data, StepsAhead) else iter(data)
        self._count = count

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Batch, Tensor]:
        started = time.perf_counter()
        try:
            input_dict, labels = next(self._items)
        except StopIteration as error:
            raise DataloaderExhaustedError("the dataloader has no further batch") from error
        self._count([labels.numel()], time.perf_counter() - started)
        return input_dict, labels

    def next_step(self) -> Step:
        """Return the next step, which a background thread has read ahead."""
        assert self.steps is not None
        started = time.perf_counter()
        step = self.steps.next_step()
        self._count([x.numel() for _, x in step.items], time.perf_counter() - started)
        return step


def _items_of(steps: StepsAhead) -> Iterator[tuple[Batch, Tensor]]:
    while True:
        step = steps.next_step()
        yield from step.items
        if step.error is not None:
            raise step.error
        if not step.counts.is_whole:
            return
