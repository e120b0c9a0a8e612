"""Samples of a dataset in a resumable order, each given to only one reader.

Two kinds of dataset, one interface: call `start(reader, num_readers)` in the process that will
iterate, then iterate for samples; `state_dict` works at any time, `restart` goes to the beginning.
"""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from torchtitan.data.document_share import DocumentShare, deal_again
from torchtitan.tools.logging import logger


class IndexedDocuments:
    """Samples of a dataset with `len()` and `[i]`, which any number of readers can share.

    Resuming takes constant time. What some readers left can be dealt to another number of them.
    """

    can_reshard = True

    def __init__(self, data: Any, name: str, infinite: bool, path: str = "") -> None:
        if len(data) == 0:
            raise ValueError(
                f"dataset {name!r} holds no documents{f': {path} is empty' if path else ''}"
            )
        self._data = data
        self._name = name
        self._path = path
        self._infinite = infinite
        self._inherited: list[dict[str, Any]] = []
        self._share: DocumentShare | None = None

    def start(self, reader: int, num_readers: int) -> None:
        self._share = DocumentShare(reader, num_readers)
        if self._inherited:
            shares = [self._share_from(state) for state in self._inherited]
            self._share = deal_again(shares, num_readers)[reader]

    @property
    def next_number(self) -> int:
        """The index in the data of the sample that iteration yields next."""
        return self._share.peek() % len(self._data)

    def sample(self, number: int) -> Any:
        return self._data[number]

    def where(self, number: int) -> str:
        """How a message names a document."""
        if hasattr(self._data, "where"):
            return self._data.where(number)
        return f"{self._path or f'dataset {self._name!r}'}, document {number} (counted from 0)"

    def restart(self) -> None:
        self._share = DocumentShare(self._share.reader, self._share.num_readers)

    def __iter__(self) -> Iterator[Any]:
        share, num_documents = self._share, len(self._data)
        while self._infinite or share.peek() < num_documents:
            number = share.peek()
            # Only the second pass is worth a line in the log.
            if number >= num_documents and number - share.num_readers < num_documents:
                logger.warning(f"Dataset {self._name} is being read again from the beginning")
            sample = self._data[number % num_documents]
            share.advance()
            yield sample

    def state_dict(self) -> dict[str, Any]:
        share = self._share
        return {
            "sample_idx": share.num_taken,
            "base": share.base,
            "pending": list(share.pending),
            "reader": share.reader,
            "num_readers": share.num_readers,
            "num_documents": len(self._data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._share = self._share_from(state)

    def inherit(self, states: list[dict[str, Any]]) -> None:
        """Continue where the readers with these states stopped, however many they were."""
        self._share = None
        self._inherited = states

    def _share_from(self, state: dict[str, Any]) -> DocumentShare:
        if state.get("num_documents") != len(self._data):
            raise ValueError(
                f"the checkpoint's data position is one in {state.get('num_documents')} documents "
                f"but dataset {self._name!r} holds {len(self._data)}: resume with the same data, "
                f"or start this data over with checkpoint.exclude_from_loading = ['dataloader']"
            )
        return DocumentShare(
            state["reader"],
            state["num_readers"],
            state["base"],
            state["sample_idx"],
            deque(state["pending"]),
        )


class StreamedDocuments:
    """Samples of a `datasets.IterableDataset`, split over ranks and data workers by `datasets`.

    The position is the stream's own, so only the same number of ranks and workers can resume.
    """

    can_reshard = False
    next_number = None  # documents have none

    def __init__(
        self, data: Any, name: str, infinite: bool, dp_rank: int, dp_world_size: int
    ) -> None:
        import datasets.distributed  # slow, and only streams need it

        if not isinstance(data, datasets.IterableDataset):
            raise ValueError(
                f"the loader of dataset {name!r} must return something with len() and [i], or a "
                f"datasets.IterableDataset, got {type(data).__name__}"
            )
        self._data = datasets.distributed.split_dataset_by_node(data, dp_rank, dp_world_size)
        self._name = name
        self._infinite = infinite
        self._loaded: dict[str, Any] | None = None
        self._has_begun = False

    def start(self, reader: int, num_readers: int) -> None:
        # The stream's epoch lives in memory that forked workers share, and each needs its own.
        self._data = copy.deepcopy(self._data)
        if get_worker_info() is not None:
            _read_position_once(self._data)

    def where(self, _number: None) -> str:
        return f"dataset {self._name!r}"

    def restart(self) -> None:
        self._loaded, self._has_begun = None, False
        self._data.load_state_dict(None)
        self._data.set_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:  # iterating a stream again would go back to where it began
            self.load_state_dict(self.state_dict())
        self._has_begun = True
        while True:
            is_whole_pass = self._loaded is None
            num_samples = 0
            for sample in self._data:
                self._loaded = None  # from now on the stream itself knows the position
                num_samples += 1
                yield sample
            if is_whole_pass and num_samples == 0:
                raise ValueError(
                    f"dataset {self._name!r} gave this rank's data worker no documents: the stream "
                    f"may have fewer parts than there are ranks times data workers; lower "
                    f"training.dataloader.num_workers"
                )
            if not self._infinite:
                return
            logger.warning(f"Dataset {self._name} is being read again from the beginning")
            self._loaded = None
            self._data.set_epoch(self._data.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        # Until it is iterated, a stream reports its beginning, not the position it was given. And as
        # the beginning, that of all data workers: a random mixture has another one in each.
        if self._loaded is None and not self._has_begun:
            return {"data": None}
        return {"data": self._loaded or self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] is None:
            self.restart()
            return
        # A stream ignores a position that was saved in another epoch than the one it is in.
        self._data.set_epoch(state["data"]["epoch"])
        self._data.load_state_dict(state["data"])
        self._loaded = state["data"]


def _read_position_once(stream: Any) -> None:
    """Have a data worker's stream read a position when its shards are known, and not before, too.

    `datasets` (5.2) first reads it into the stream of all workers. Where it is a list by shards, as
    after `shuffle`, that one's is longer: an IndexError.
    """
    prepare = getattr(stream, "_prepare_ex_iterable_for_iteration", None)
    if prepare is None or not hasattr(stream, "_starting_state_dict"):  # another version
        return

    def prepare_without_position(*args: Any, **kwargs: Any) -> Any:
        position, stream._starting_state_dict = stream._starting_state_dict, None
        try:
            return prepare(*args, **kwargs)
        finally:
            stream._starting_state_dict = position

    stream._prepare_ex_iterable_for_iteration = prepare_without_position
