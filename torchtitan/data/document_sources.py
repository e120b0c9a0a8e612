"""Samples of a dataset in a resumable order, each read by only one reader.

The two classes have one interface: call `start(reader, num_readers)` in the process that will
iterate, then iterate over the samples. `state_dict` works at any time; `restart` goes back to the
beginning.
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

    Resuming takes constant time, with the same or another number of readers.
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
        """Return a document's name for messages."""
        if hasattr(self._data, "where"):
            return self._data.where(number)
        return f"{self._path or f'dataset {self._name!r}'}, document {number} (counted from 0)"

    def restart(self) -> None:
        self._share = DocumentShare(self._share.reader, self._share.num_readers)

    def __iter__(self) -> Iterator[Any]:
        share, num_documents = self._share, len(self._data)
        while self._infinite or share.peek() < num_documents:
            number = share.peek()
            # Only the beginning of the second pass is logged.
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
        """Continue where readers with these states stopped; their number may differ from ours."""
        self._share = None
        self._inherited = states

    def _share_from(self, state: dict[str, Any]) -> DocumentShare:
        if state.get("num_documents") != len(self._data):
            raise ValueError(
                f"the checkpoint's data position is for {state.get('num_documents')} documents, but "
                f"dataset {self._name!r} holds {len(self._data)}: resume with the same data, or "
                f"begin with this data from its start: checkpoint.exclude_from_loading = ['dataloader']"
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

    The saved position is that of `datasets`, so only the same number of ranks and workers can resume.
    """

    can_reshard = False
    next_number = None  # a stream does not number its documents

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
        # The stream keeps its epoch in memory that forked workers share, but each needs its own.
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
        if self._has_begun:  # a stream that is iterated again would go back to its first position
            self.load_state_dict(self.state_dict())
        self._has_begun = True
        while True:
            is_whole_pass = self._loaded is None
            num_samples = 0
            for sample in self._data:
                self._loaded = None  # from now on the stream reports its own position
                num_samples += 1
                yield sample
            if is_whole_pass and num_samples == 0:
                raise ValueError(
                    f"dataset {self._name!r} has no documents for this rank's data worker: the stream "
                    f"may have fewer parts than there are ranks times data workers; lower "
                    f"training.dataloader.num_workers"
                )
            if not self._infinite:
                return
            logger.warning(f"Dataset {self._name} is being read again from the beginning")
            self._loaded = None
            self._data.set_epoch(self._data.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        # Before iteration a stream reports its beginning, not the position that it has loaded. And the
        # beginning is the same for all data workers, although in a random mixture they differ: None.
        if self._loaded is None and not self._has_begun:
            return {"data": None}
        return {"data": self._loaded or self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] is None:
            self.restart()
            return
        # A stream ignores a position of another epoch than its current one.
        self._data.set_epoch(state["data"]["epoch"])
        self._data.load_state_dict(state["data"])
        self._loaded = state["data"]


def _read_position_once(stream: Any) -> None:
    """Patch a data worker's stream so that it loads a position only once its shards are known.

    `datasets` (read in 5.2) also loads it earlier, into the stream of all workers. After `shuffle` the
    position is a list by shards, and all workers' shards are more than this worker's: an IndexError.
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
