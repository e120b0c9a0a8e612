"""Sources of documents, and the share of each source that one row stream (see `row_streams`) reads.

A source is indexed (it has `len()` and `[i]`) or streamed (a `datasets.IterableDataset`). In an indexed
source of N documents, document number n is the one at place n % N of epoch n // N.
"""

import copy
import hashlib
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from torchtitan.data.open_document import OpenDocument, Tokens
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger, warn_once

BEGIN_AGAIN = (
    "begin with this data from its start: checkpoint.exclude_from_loading = ['dataloader']"
)

# Shuffling a streamed source permutes this many documents at a time.
STREAM_BLOCK = 1024
_ROUNDS = 8
_WORD = 2**64 - 1

Encoder = Callable[[Any], str | Tokens]
"""Converts a sample to a string, which is tokenized later, or to the tokens of the whole document."""


@dataclass(frozen=True)
class Order:
    """Maps document numbers, which keep increasing over the epochs, to indices in a data set of N documents.

    Number n is read in epoch n // N. seed: None keeps the order of the data set. Otherwise a Feistel network
    of 8 rounds, on a power of four of at least N indices, permutes each epoch; cycle walking applies the
    network until the index is below N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    num_documents: int
    seed: str | None = None

    def index(self, number: int) -> int:
        pass_number, index = divmod(number, self.num_documents)
        if self.seed is None:
            return index
        keys = _round_keys(self.seed, pass_number)
        while (index := self._permuted(index, keys)) >= self.num_documents:
            pass
        return index

    def of_pass(self, pass_number: int) -> NDArray[np.int64]:
        """Return the indices [N] of all documents, in the order of epoch `pass_number`."""
        indices = np.arange(self.num_documents, dtype=np.uint64)
        if self.seed is not None:
            keys = _round_keys(self.seed, pass_number)
            beyond = np.ones(len(indices), bool)
            while beyond.any():
                indices[beyond] = self._permuted(indices[beyond], keys)
                beyond = indices >= self.num_documents
        return indices.astype(np.int64)

    def _permuted(self, index: Any, keys: list[int]) -> Any:
        half_bits = max(3, -(-(self.num_documents - 1).bit_length() // 2))
        mask = (1 << half_bits) - 1
        left, right = index >> half_bits, index & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half_bits | right


# Row streams may be in different epochs, so the keys of several epochs are cached.
@lru_cache(64)
def _round_keys(seed: str, pass_number: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed} {pass_number}".encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mixed(x: Any) -> Any:
    """Return a 64-bit hash of x: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _WORD
    return x ^ x >> 31


FeedState = tuple[int, int, list[int]]
"""Position of one of S readers of an indexed source: (base, number of documents taken, pending).

Reader r first reads the documents with the numbers `pending`, which an earlier run had not reached, and
then the numbers base + r, base + r + S, and so on.
"""


def deal_again(states: Sequence[FeedState], num_readers: int) -> list[FeedState]:
    """Divide the documents that the readers of `states` did not read among `num_readers` new readers.

    The base of the new `FeedState`s is the highest of the old readers' next document numbers; the unread
    documents below the base are pending.
    """
    num_saved = len(states)
    next_numbers = [first + r + n * num_saved for r, (first, n, _) in enumerate(states)]
    base = max(next_numbers)
    not_taken: list[int] = []
    for next_number, (_, _, pending) in zip(next_numbers, states, strict=True):
        not_taken += [*pending, *range(next_number, base, num_saved)]
    not_taken.sort()
    return [(base, 0, not_taken[reader::num_readers]) for reader in range(num_readers)]


@dataclass
class Source:
    """A data set as a source of documents.

    data: has `len()` and `[i]`, or is a `datasets.IterableDataset`.
    number, weight: the source's index and weight in a mixture. counts: see `row_plan.count_tokens`.
    limit: the number of epochs, not always an integer, after which the source ends; None: no limit.
    again: the warning before the second epoch of a source without limit. seed: None keeps the data's order.
    """

    name: str
    data: Any
    encode: Encoder
    tokenizer: BaseTokenizer
    path: str = ""
    weight: float = 1.0
    limit: float | None = None
    again: str = ""
    seed: int | None = None
    is_text: bool = True
    number: int = 0
    order: Order | None = field(init=False, default=None)
    counts: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        self.again = self.again or f"Dataset {self.name} is being read again from the beginning"
        # The begin- and end-of-text tokens; emptied after the warning that a document contains them.
        tokens = (getattr(self.tokenizer, f"{kind}_token", None) for kind in ("bos", "eos"))
        self._separators = sorted({token for token in tokens if token})
        if self.is_indexed:
            if not len(self.data):
                raise ValueError(f"dataset {self.name!r} holds no documents; correct {self.path!r}")
            # The seed includes the source's number, so that sources of equal length are shuffled differently.
            seed = None if self.seed is None else f"{self.seed} {self.number}"
            self.order = Order(len(self.data), seed)
        elif not hasattr(self.data, "num_shards"):
            raise ValueError(
                f"the loader of dataset {self.name!r} must return something with len() and [i], or "
                f"a datasets.IterableDataset, got {type(self.data).__name__}"
            )

    @property
    def is_indexed(self) -> bool:
        return hasattr(self.data, "__len__")

    def leave_out(self, is_empty: NDArray[np.bool_]) -> None:
        self.data = Subset(self.data, np.flatnonzero(~is_empty).tolist())
        self.order = Order(len(self.data), self.order.seed)
        if self.counts is not None:
            self.counts = self.counts[~is_empty]

    def identity(self) -> dict[str, Any]:
        n = len(self.data) if self.is_indexed else None
        return {"name": self.name, "num_documents": n, "seed": self.seed}

    def feed(self, reader: int, num_readers: int) -> "IndexedFeed | StreamedFeed":
        kind = IndexedFeed if self.is_indexed else StreamedFeed
        return kind(self, reader, num_readers)

    def read(self, number: int) -> OpenDocument:
        index = self.order.index(number)
        document = self.open(self.data[index], index)
        document.number = number
        return document

    def open(self, sample: Any, index: int | None = None) -> OpenDocument:
        """Return a sample as a document. index: the sample's index in the data set; None if streamed."""
        content = self.checked(self.encode, sample, index)
        document = OpenDocument(index, self.tokenizer, source=self.number)
        document.index = -1 if index is None else index
        if not isinstance(content, str):
            document.tokens = content
            return document
        document.text = content
        found = [f"{t!r} ({content.count(t)} times)" for t in self._separators if t in content]
        if found:
            self._separators = []
            logger.warning(
                f"{self.where(index)}: the text contains {' and '.join(found)}, encoded as a control "
                "token that starts no new document; remove it if it should be plain text (logged once)"
            )
        return document

    def checked(self, encode: Callable[[Any], Any], sample: Any, index: int | None) -> Any:
        """Return `encode(sample)`; adds the document's name to a ValueError."""
        try:
            content = encode(sample)
            if isinstance(content, str):
                content.encode()  # raises UnicodeEncodeError, as the tokenizer would later
            return content
        except ValueError as error:
            problem = str(error)
            if isinstance(error, UnicodeEncodeError):
                half = error.object[error.start]
                problem = f"the text has half of a surrogate pair, {half!r}; correct the document"
            raise ValueError(f"{self.where(index)}: {problem}") from error

    def reopen(self, place: tuple[int, ...] | dict[str, Any]) -> OpenDocument:
        """Return the document at a saved `OpenDocument.place`."""
        if isinstance(place, dict) and "tokens" in place:
            trained = place.get("trained")
            tokens = Tokens(np.array(place["tokens"], np.int32), trained and np.array(trained))
            return OpenDocument(None, self.tokenizer, tokens=tokens, source=self.number)
        if isinstance(place, dict) and "used" in place:
            text, used = place["text"], place["used"]
            return OpenDocument(None, self.tokenizer, text, used=used, source=self.number)
        if isinstance(place, dict) or place[2]:
            raise ValueError(
                "an earlier version saved the data position inside a long document, which this version cannot "
                f"read; {BEGIN_AGAIN}"
            )
        _, number, _, used = place
        document = self.read(number)
        if used:
            document.take(used)
        return document

    def where(self, index: int | None) -> str:
        if index is None:
            return f"dataset {self.name!r}"
        data = self.data
        if isinstance(data, Subset):  # `leave_out` makes the subset
            data, index = data.dataset, data.indices[index]
        if hasattr(data, "where"):
            return data.where(index)
        return f"{self.path or f'dataset {self.name!r}'}, document {index} (counted from 0)"


class IndexedFeed:
    """Reads the documents of an indexed source for one of `num_readers` readers (S in `FeedState`).

    `StreamedFeed` has the same methods for iterable data sets.
    """

    def __init__(self, source: Source, reader: int, num_readers: int) -> None:
        self._source, self._reader, self._num_readers = source, reader, num_readers
        self.load((0, 0, []))

    def peek(self) -> OpenDocument | None:
        """Return the next document, which `advance` takes; None at the end of the data."""
        if self._next is None:
            source, n = self._source, len(self._source.data)
            number = self._base + self._reader + self._num_taken * self._num_readers
            if self._pending:
                number = self._pending[0]
            if source.limit is not None and number >= source.limit * n:
                return None
            if number >= n and source.limit is None:
                warn_once(logger, source.again)
            self._next = source.read(number)
        return self._next

    def advance(self) -> None:
        if self._pending:
            self._pending.popleft()
        else:
            self._num_taken += 1
        self._next = None

    def state(self) -> FeedState:
        return self._base, self._num_taken, list(self._pending)

    def load(self, state: FeedState) -> None:
        self._base, self._num_taken, pending = state
        self._pending = deque(pending)
        self._next: OpenDocument | None = None


class StreamedFeed:
    """Reads one reader's part of a `datasets.IterableDataset`.

    With a seed, each epoch shuffles the files, and the documents within each block of `STREAM_BLOCK`. The
    state is (epoch, the data set's state at the start of the block, number of documents taken from it).
    """

    def __init__(self, source: Source, reader: int, num_readers: int) -> None:
        import datasets.distributed

        self.source = source
        # A copy, because the dataset keeps its epoch in memory that forked workers share.
        data = copy.deepcopy(source.data)
        if source.seed is not None:
            data = data.shuffle(seed=source.seed, buffer_size=1)
        self._data = datasets.distributed.split_dataset_by_node(data, reader, num_readers)
        self._go_to(0, None)

    def peek(self) -> OpenDocument | None:
        """Return the next document, which `advance` takes; None at the end of the data."""
        if self._next is not None:
            return self._next
        if not self._block and not self._read_block():
            if self._start is None:
                raise ValueError(
                    f"dataset {self.source.name!r} has no documents for this rank; train on fewer ranks"
                )
            if self.source.limit is None:
                warn_once(logger, self.source.again)
            elif self._pass + 1 >= self.source.limit:
                return None
            self._go_to(self._pass + 1, None)
            return self.peek()
        self._next = self.source.open(self._block[0])
        return self._next

    def advance(self) -> None:
        self._block.popleft()
        self._num_taken += 1
        self._next = None

    def state(self) -> Any:
        return self._pass, self._start, self._num_taken

    def load(self, state: Any) -> None:
        pass_number, position, num_taken = state
        self._go_to(pass_number, position)
        if num_taken:
            self._read_block()
            for _ in range(num_taken):
                self._block.popleft()
            self._num_taken = num_taken

    def _go_to(self, pass_number: int, position: Any) -> None:
        self._pass, self._has_begun = pass_number, False
        # Set the epoch first, because the dataset ignores a position that was saved in another epoch.
        self._data.set_epoch(pass_number)
        self._data.load_state_dict(position)
        self._samples: Iterator[Any] | None = None
        self._block: deque[Any] = deque()
        self._start, self._num_taken = position, 0
        self._next: OpenDocument | None = None

    def _read_block(self) -> bool:
        """Fill the block with the next documents of the epoch; return False if there are none."""
        # Before the first document, `datasets` reports the start of the data, not the loaded position.
        if self._has_begun:
            self._start = self._data.state_dict()
        self._num_taken = 0
        if self._samples is None:
            self._samples = iter(self._data)
        n = 1 if self.source.seed is None else STREAM_BLOCK
        # Hide the data worker, because `datasets` (5.2) would divide the stream among the workers again.
        with torch_parts.replaced("worker_info", None):
            samples = list(itertools.islice(self._samples, n))
        self._has_begun |= bool(samples)
        if self.source.seed is not None and samples:
            order = Order(len(samples), str(self.source.seed))
            first = (self._pass << 32 | zlib.crc32(repr(self._start).encode())) * len(samples)
            samples = [samples[order.index(first + i)] for i in range(len(samples))]
        self._block.extend(samples)
        return bool(samples)
