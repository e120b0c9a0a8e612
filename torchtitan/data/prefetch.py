"""Reads and counts the next step's batches while this step trains."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import Batch, TokenBatch
from torchtitan.data.dataloader import DataloaderExhaustedError
from torchtitan.distributed.processes.late_ranks import READING_THREAD
from torchtitan.tools.utils import use_device

_SECONDS_TO_END = 5


@dataclasses.dataclass
class StepCounts:
    """One step's counts, of this rank or summed over the data-parallel ranks."""

    denominator: int  # denominator of the loss
    num_ran_out: int = 0  # number of ranks whose data ended
    num_failed: int = 0  # number of ranks that failed to read

    @property
    def is_whole(self) -> bool:
        return not (self.num_ran_out or self.num_failed)


@dataclasses.dataclass
class Step:
    """One step's batches on this rank, with labels masked by `DocumentPolicy.mask_labels`.

    counts: summed over the data-parallel ranks. error: the exception that ended reading.
    position: the dataloader's state after these batches.
    items: each batch as the dataloader returned it, (input_dict, labels).
    """

    batches: list[TokenBatch]
    counts: StepCounts
    own_denominator: int = 0  # this rank's part of the loss denominator
    error: Exception | None = None
    position: Any = None
    items: list[tuple[Batch, Tensor]] = dataclasses.field(default_factory=list)


def read_step(
    iterator: Iterator[tuple[Batch, Tensor]],
    num_batches: int,
    to_batch: Callable[[Batch, Tensor], TokenBatch],
    denominator_of: Callable[[TokenBatch], int],
    sum_over_ranks: Callable[[StepCounts], StepCounts],
) -> Step:
    """Read the batches of a step and add up their denominators; an exception is stored in `Step.error`."""
    step = Step([], StepCounts(0))
    try:
        for _ in range(num_batches):
            item = next(iterator)
            batch = to_batch(*item)
            step.own_denominator += denominator_of(batch)
            step.items.append(item)
            step.batches.append(batch)
    except (StopIteration, DataloaderExhaustedError):
        step.counts.num_ran_out = 1
    except Exception as error:  # raised later, when all ranks know of it
        step.error, step.counts.num_failed = error, 1
    step.counts.denominator = step.own_denominator
    step.counts = sum_over_ranks(step.counts)
    return step


class StepsAhead:
    """Reads a dataloader in background threads, one step ahead of the loop that calls `next_step`.

    `state_dict` is the dataloader's position after the last step that `next_step` returned.

    to_batch: converts the dataloader's (input_dict, labels) to a `TokenBatch`. denominator_of: returns
        what a batch adds to the loss denominator. Both are called in a reading thread, on `device`.
    n_duplicates: the number of ranks that read the same data. None: all ranks read the same data, so
        counts are not summed. Otherwise the constructor creates a gloo group of all ranks for the sum.
    """

    def __init__(
        self,
        dataloader: Iterable[tuple[Batch, Tensor]],
        batches_per_step: int,
        n_steps: int,
        to_batch: Callable[[Batch, Tensor], TokenBatch],
        denominator_of: Callable[[TokenBatch], int],
        device: torch.device,
        n_duplicates: int | None,
        timeout: timedelta,
    ) -> None:
        self._dataloader, self._device = dataloader, device
        self._to_batch, self._denominator_of = to_batch, denominator_of
        self._batches_per_step, self._n_unread = batches_per_step, n_steps
        self._n_duplicates, self._group = n_duplicates, None
        if n_duplicates is not None and dist.get_backend() != "fake":
            # A separate group, because the reading thread may wait in it while training runs collectives.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # Like isinstance(dataloader, Stateful), without importing torch's Stateful, which would load DTensor.
        self.keeps_position = all(
            hasattr(dataloader, name) for name in ("state_dict", "load_state_dict")
        )
        self._position = self._read_position()
        # Created in this thread, because torch draws the data workers' seed from its default generator.
        self._iterator = iter(dataloader)
        self._last = Step([], StepCounts(0))
        self._next: Future[Step] | None = None  # the step that a thread reads ahead
        self._read_next()

    def next_step(self) -> Step:
        """Return the next step; without batches if an earlier step ran out of data or failed on any rank.

        Raises errors of the communication between ranks.
        """
        if not self._last.counts.is_whole:
            return dataclasses.replace(self._last, batches=[], items=[])
        assert self._next is not None  # the trainer asks for at most `n_steps` steps
        self._last = step = self._next.result()
        self._next = None
        if step.counts.is_whole:
            self._position = step.position
            self._read_next()
        return step

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("the data are being read; load a checkpoint before or after train()")

    def close(self) -> None:
        """Stop reading, and reset the dataloader to the position that training has reached."""
        untaken = [] if self._next is None else [self._next]
        if wait(untaken, timeout=_SECONDS_TO_END).not_done:
            # The thread still reads, or waits for other ranks.
            return
        took_all = not untaken and self._last.counts.is_whole
        if self.keeps_position and not took_all:
            self._dataloader.load_state_dict(self._position)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _read_next(self) -> None:
        if self._n_unread:
            self._n_unread -= 1
            self._next = Future()
            # A daemon: a read that hangs must not keep the process from ending.
            args = (self._next,)
            Thread(target=self._read, args=args, name=READING_THREAD, daemon=True).start()

    # ---- methods that the reading thread runs ----

    def _read(self, read: Future[Step]) -> None:
        try:
            use_device(self._device)
            step = read_step(
                self._iterator,
                self._batches_per_step,
                self._to_batch,
                self._denominator_of,
                self._sum_over_ranks,
            )
            if step.counts.is_whole:
                step.position = self._read_position()
            read.set_result(step)
        except Exception as error:  # a communication error; `step.error` holds a reading error
            read.set_exception(error)

    def _sum_over_ranks(self, counts: StepCounts) -> StepCounts:
        if self._group is None:
            return counts
        sums = torch.tensor(dataclasses.astuple(counts))
        dist.all_reduce(sums, group=self._group)
        # Rounded up, because only some of the ranks with the same data may have failed.
        return StepCounts(*(-(-n // self._n_duplicates) for n in sums.tolist()))

    def _read_position(self) -> Any:
        # A copy, because a dataloader may change its state with the next batch.
        return copy.deepcopy(self._dataloader.state_dict()) if self.keeps_position else None
