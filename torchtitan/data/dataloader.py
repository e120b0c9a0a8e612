"""Dataloaders that checkpoint their position in the data, and resume it on another number of ranks."""

import inspect
import itertools
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.batch.documents import SAMPLE_IDS
from torchtitan.data.document_sources import BEGIN_AGAIN
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.row_streams import Row
from torchtitan.distributed.processes.stop import leave_signals_to_trainer
from torchtitan.tools.logging import logger
from torchtitan.tools.unpickling import read_plain
from torchtitan.tools.utils import get_device_type

_MOST_RANKS = 2**20


class DataloaderExhaustedError(Exception):
    """The data ended before the last step. Not StopIteration, because generators turn it into RuntimeError."""


class BaseDataLoader(ABC):
    """Batches `(input_dict, labels)` with a position that can be saved and restored."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]: ...


class ParallelAwareDataloader(StatefulDataLoader, BaseDataLoader):
    """One data-parallel rank's batches; keyword arguments are StatefulDataLoader's.

    The state of rank r is `{"dp_rank_<r>": pickle, "world_size": n}`, so one checkpoint holds the
    states of all ranks. A `PackedDataset` resumes on any number of ranks and data workers. Other datasets
    resume only on the same numbers, unless they have `can_reshard = True` and `inherit(states)`.
    """

    def __init__(
        self, dataset: IterableDataset, dp_rank: int, dp_world_size: int, **kwargs: Any
    ) -> None:
        self._validate_kwargs(kwargs)
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self._rank_id = f"dp_rank_{dp_rank}"
        self._is_known_to_be_readable = False
        self.needs_all_positions = isinstance(dataset, PackedDataset)
        if self.needs_all_positions:
            kwargs.setdefault("collate_fn", _collate_rows)
        with warnings.catch_warnings():  # torchdata 0.11 warns on torch 2.13; users cannot help it
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            super().__init__(dataset, **kwargs)

    @staticmethod
    def _validate_kwargs(kwargs: dict[str, Any]) -> None:
        """Remove, in place, arguments that have no effect here. Raises ValueError for unknown names."""
        # The first two parameters are `self` and `dataset`.
        _, _, *known = inspect.signature(StatefulDataLoader.__init__).parameters
        if unknown := sorted(set(kwargs) - set(known)):
            raise ValueError(
                f"Invalid dataloader kwargs: {', '.join(unknown)}; StatefulDataLoader takes "
                f"{', '.join(known)}"
            )
        if kwargs.get("num_workers"):
            kwargs.setdefault("worker_init_fn", leave_signals_to_trainer)
        else:
            kwargs.pop("persistent_workers", None)
            kwargs.pop("prefetch_factor", None)
        if get_device_type() == "cpu":
            kwargs.pop("pin_memory", None)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batches = super().__iter__()
        if self.needs_all_positions:
            batches = self._whole_batches(batches)
        return map(_with_sample_ids_aside, batches)

    def _whole_batches(self, parts: Iterator[Any]) -> Iterator[Any]:
        """Yield whole batches, joined from the parts that the data workers read; see `_collate_rows`."""
        while batch := list(itertools.islice(parts, max(self.num_workers, 1))):
            rows = [row for rows, _ in batch for row in rows]
            if not rows:  # no data worker has a row left
                return
            read = [part for _, part in batch if part is not None]
            if len(read) > 1:
                order = torch.tensor(rows).argsort()

                def join(parts: Any, order: Tensor = order) -> Tensor:
                    joined = torch.cat(parts)[order]
                    return joined.pin_memory() if self.pin_memory else joined

                inputs, labels = zip(*read, strict=True)
                read = [({key: join([x[key] for x in inputs]) for key in inputs[0]}, join(labels))]
            yield read[0]

    def _get_iterator(self) -> Any:
        if self.next_iter_state is None:
            return super()._get_iterator()
        with _one_error_if_damaged():  # creating the iterator reads the loaded position
            return super()._get_iterator()

    def state_dict(self) -> dict[str, Any]:
        # Pickled, so that a checkpoint stores one blob per rank, whatever torchdata's state contains.
        state = pickle.dumps(super().state_dict())
        if not self._is_known_to_be_readable:  # an unreadable state fails now, not on resuming
            read_plain(state, "the data position, which a checkpoint is to hold,")
            self._is_known_to_be_readable = True
        return {self._rank_id: state, "world_size": self.dp_world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this rank's saved position; divide the positions if the number of ranks has changed.

        Raises ValueError for a damaged position, and for positions that cannot be divided.
        """
        if not state_dict:
            return
        saved_world_size = state_dict["world_size"]
        if not isinstance(saved_world_size, int) or not 1 <= saved_world_size <= _MOST_RANKS:
            raise ValueError(
                f"the data position's number of ranks is {saved_world_size!r}: the checkpoint is "
                f"damaged; {BEGIN_AGAIN}"
            )
        if self._rank_id not in state_dict and saved_world_size == self.dp_world_size:
            logger.warning(
                f"the checkpoint has no data position for {self._rank_id}: this rank reads its data from the start"
            )
            return
        if saved_world_size == self.dp_world_size and not self.needs_all_positions:
            own_state = _read_loader_state(state_dict, self._rank_id)
            with _one_error_if_damaged():
                num_workers = len(_worker_snapshots(own_state))
            if num_workers == self.num_workers:
                super().load_state_dict(own_state)
                return
        self._inherit(state_dict, saved_world_size)

    def _inherit(self, state_dict: dict[str, Any], saved_world_size: int) -> None:
        names = [f"dp_rank_{rank}" for rank in range(saved_world_size)]
        missing = [name for name in names if name not in state_dict]
        problem = ""
        if not self.needs_all_positions and not getattr(self.dataset, "can_reshard", False):
            problem = "the position of this dataset does not divide"
        if missing and saved_world_size != self.dp_world_size:
            problem = f"{', '.join(missing)} are missing"
        if problem:
            raise ValueError(
                f"the data position was saved by {saved_world_size} data-parallel ranks; for "
                f"{self.dp_world_size} ranks with {self.num_workers} data workers, {problem}: resume on "
                f"{saved_world_size} ranks with as many data workers as before, or {BEGIN_AGAIN}"
            )
        loader_states = [_read_loader_state(state_dict, n) for n in names if n in state_dict]
        super().load_state_dict({})  # drops the current iterator and its data workers
        self.next_iter_state = None  # drops a position that an earlier call loaded
        with _one_error_if_damaged():
            self.dataset.inherit(
                [state for loader in loader_states for state in _reader_states(loader)]
            )


def _collate_rows(rows: list[Row | None]) -> tuple[list[int], Any]:
    """Return the indices of the rows that are not None, and these rows as a batch."""
    read = {number: row for number, row in enumerate(rows) if row is not None}
    return list(read), default_collate(list(read.values())) if read else None


def _read_loader_state(state_dict: dict[str, Any], name: str) -> dict[str, Any]:
    state = read_plain(state_dict[name], f"the data position of {name}")
    if not isinstance(state, dict):
        raise ValueError(
            f"the data position of {name} is a {type(state).__name__}, not a dict: the checkpoint "
            f"is damaged; {BEGIN_AGAIN}"
        )
    return state


@contextmanager
def _one_error_if_damaged() -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[-1]
        raise ValueError(
            f"the data position in the checkpoint does not fit this dataset and dataloader "
            f"({type(error).__name__}: {reason}); {BEGIN_AGAIN}"
        ) from error


def _with_sample_ids_aside(batch: Any) -> Any:
    """Move the entry "sample_ids", [B, 2], to the attribute `batch["input"].sample_ids`."""
    if isinstance(batch, list | tuple) and isinstance(batch[0], dict) and SAMPLE_IDS in batch[0]:
        batch[0]["input"].sample_ids = batch[0].pop(SAMPLE_IDS)
    return batch


# Private keys of torchdata 0.8 to 0.11: there is no other way to read the positions of workers.
def _worker_snapshots(loader_state: dict[str, Any]) -> dict[str, Any]:
    return loader_state.get("_snapshot", {}).get("_worker_snapshots", {})


def _reader_states(loader_state: dict[str, Any]) -> list[dict[str, Any]]:
    snapshots = _worker_snapshots(loader_state)
    if not snapshots:
        return [loader_state["dataset_state"]]
    if loader_state["_steps_since_snapshot"]:
        raise ValueError(
            "the data position was saved with snapshot_every_n_steps > 1: resume with the same numbers of "
            "ranks and data workers"
        )
    return [snapshots[f"worker_{index}"]["dataset_state"] for index in range(len(snapshots))]
