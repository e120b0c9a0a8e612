"""Reads and counts the next step's batches while this step trains."""

import copy
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.batch.batch import Batch, TokenBatch
from torchtitan.data.dataloader import DataloaderExhaustedError
from torchtitan.tools.utils import use_device

_SECONDS_TO_END = 5

Item = tuple[Batch, Tensor]
"""(input_dict, labels) of a microbatch"""


@dataclasses.dataclass
class StepCounts:
    """One step's sums over data-parallel ranks: valid tokens, and ranks that got too few items."""

    num_valid_tokens: int
    num_ran_out: int = 0
    num_failed: int = 0

    @property
    def is_whole(self) -> bool:
        return not (self.num_ran_out or self.num_failed)


@dataclasses.dataclass
class Step:
    """One step's items on this rank.

    batches: made of the items. error: what came in place of a further one.
    counts: of this rank, until they are summed. position: of the dataloader after the items.
    """

    items: list[Item]
    batches: list[TokenBatch]
    counts: StepCounts
    error: Exception | None = None
    position: Any = None


def read_step(iterator: Iterator[Item], n_items: int, pack: Callable[[Item], TokenBatch]) -> Step:
    """Read the items of a step; what reading them raises is in it."""
    step = Step([], [], StepCounts(0))
    try:
        for _ in range(n_items):
            item = next(iterator)
            batch = pack(item)
            step.counts.num_valid_tokens += batch.num_valid
            step.items.append(item)
            step.batches.append(batch)
    except (StopIteration, DataloaderExhaustedError):
        step.counts.num_ran_out = 1
    except Exception as error:  # raised once the other ranks know
        step.error, step.counts.num_failed = error, 1
    return step


class StepsAhead:
    """Reads a dataloader in a thread, one step ahead of the loop that iterates over this.

    Its state is the dataloader's position, if it has one, after the last step that was taken.

    items_per_step, n_steps: nothing is read beyond these.
    pack: makes a batch of an item, with the labels that count; called in the thread.
    device: what the dataloader pins memory for.
    n_duplicates: how many ranks read the same data; None if there is one reader of data. Counts are
        summed over ranks in host memory, by a process group that all ranks make here.
    """

    def __init__(
        self,
        dataloader: Iterable[Item],
        items_per_step: int,
        n_steps: int,
        pack: Callable[[Item], TokenBatch],
        device: torch.device,
        n_duplicates: int | None,
        timeout: timedelta,
    ) -> None:
        self._dataloader = dataloader
        self._items_per_step, self._n_unread = items_per_step, n_steps
        self._pack = pack
        self._device = device
        self._n_duplicates = n_duplicates
        self._group = None
        if n_duplicates is not None and dist.get_backend() != "fake":
            # Used for nothing else: the thread may wait here while others train.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.keeps_position = isinstance(dataloader, Stateful)
        self._position = self._read_position()
        # In this thread: torch draws the seed of data workers from its generator.
        self._iterator = iter(dataloader)
        self.counts = StepCounts(0)
        self.batch: TokenBatch
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[Step | Exception] = queue.SimpleQueue()
        # A daemon: a read that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="data of the next step", daemon=True)
        self._thread.start()
        self._read_next()

    def __iter__(self) -> Iterator[Item]:
        """Yield the items; `batch` is made of the last, and `counts` belong to its step.

        Ends after an incomplete step. Raises what the dataloader raised, after the items before it.
        """
        while True:
            step = self._steps.get()
            if isinstance(step, Exception):
                raise step
            self.counts = step.counts
            if step.counts.is_whole:
                self._position = step.position
                self._read_next()
            for item, self.batch in zip(step.items, step.batches, strict=True):
                yield item
            if step.error is not None:
                raise step.error
            if not step.counts.is_whole:
                return

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("the data are being read; load a checkpoint before or after train()")

    def close(self) -> None:
        """Read no further, and put the dataloader where training stands."""
        self._wanted.put(False)
        self._thread.join(timeout=_SECONDS_TO_END)
        if self._thread.is_alive():  # it reads, or waits for other ranks, perhaps for long
            return
        took_all = self._steps.empty() and self.counts.is_whole
        if self.keeps_position and not took_all:
            self._dataloader.load_state_dict(self._position)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _read_next(self) -> None:
        if self._n_unread:
            self._n_unread -= 1
            self._wanted.put(True)

    # ---- in the thread ----

    def _run(self) -> None:
        use_device(self._device)
        while self._wanted.get():
            try:
                step = read_step(self._iterator, self._items_per_step, self._pack)
                if self._group is not None:
                    sums = torch.tensor(dataclasses.astuple(step.counts))
                    dist.all_reduce(sums, group=self._group)
                    # Rounded up: only some of the ranks that read the same data may have failed.
                    step.counts = StepCounts(*(-(-n // self._n_duplicates) for n in sums.tolist()))
                if step.counts.is_whole:
                    step.position = self._read_position()
                self._steps.put(step)
            except Exception as error:  # of communication; the data's own are in the step
                self._steps.put(error)
                return

    def _read_position(self) -> Any:
        """A copy: what a dataloader hands out may change with the next item."""
        return copy.deepcopy(self._dataloader.state_dict()) if self.keeps_position else None
