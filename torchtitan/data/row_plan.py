"""Plans the rows of a run with a known number of epochs, from the number of tokens of each document.

A plan depends only on the lengths of all documents and the config. Row r of the plan is row r % G of
step r // G, where G is the number of rows in the global batch, so the data position is the number of rows
read. No row holds documents of two epochs; an epoch's last row is padded. P: number of document pieces.
"""

import hashlib
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.document_sources import Source
from torchtitan.data.local_files import record_of
from torchtitan.data.open_document import PIECE_CHARACTERS, OpenDocument, Tokens
from torchtitan.data.row_streams import Packing, Row
from torchtitan.data.token_files import tokenizer_hash
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.processes.ranks import all_ranks, num_ranks, on_all_ranks
from torchtitan.tools.files import cache_folder, open_file, whole_file
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import _rank

# Packing "fit" sorts the documents of about this many rows at a time.
ROWS_OF_A_BLOCK = 1024


class Plan:
    """The planned rows of sources that each have a limit on their epochs. Creating a plan is collective.

    A single source is planned epoch by epoch. All epochs of several sources are merged and planned as one
    epoch, in which the shares of tokens follow the weights until a source ends. num_rows: number of rows.
    """

    def __init__(self, sources: Sequence[Source], packing: Packing) -> None:
        self._sources, self._packing = sources, packing
        self._limits = [source.limit or 0 for source in sources]
        lengths = [count_tokens(source)[:, 0] for source in sources]
        self.lengths = np.concatenate(lengths)  # tokens of each document, source after source
        self._ends = np.cumsum([len(n) for n in lengths])  # each source's end in `lengths`
        if not self.lengths.any():
            raise ValueError(
                f"dataset {sources[0].name!r}: no document has a token; use other documents, or "
                "raise training.seq_len if its chats are too long"
            )
        self._number, self._pass = -1, np.empty((4, 0), np.int64)
        self._last: tuple[int, int, OpenDocument] | None = None
        orders = [(len(s.data), s.seed, s.limit, s.weight) for s in sources]
        content = hashlib.sha256(self.lengths.tobytes()).hexdigest()
        key = [packing.method, packing.seq_len, ROWS_OF_A_BLOCK, content, sources[0].seed]
        self._passes = kept(["passes", key, orders], self._count_rows)
        if len(sources) > 1:  # a single source may resume with another number of epochs
            key.append(orders)
        self._digest = hashlib.sha256(repr(key).encode()).hexdigest()
        self.num_rows = int(self._passes.sum())

    def identity(self) -> tuple[str, list[int]]:
        """Return (digest, number of rows per epoch), which identify the plan that a position belongs to."""
        return self._digest, self._passes.tolist()

    def pieces(self, row: int) -> tuple[list[OpenDocument], list[Tokens]]:
        """Return the documents of a row and their tokens, as `Packing.row` takes them."""
        if row >= self.num_rows:
            return [], []  # a row after the last row is padding
        ends = np.cumsum(self._passes)
        number = int(np.searchsorted(ends, row, side="right"))
        row -= int(ends[number] - self._passes[number])
        pieces = self._go_to(number)
        first, last = np.searchsorted(pieces[0], [row, row + 1])
        read = [self._read(*piece) for piece in pieces[1:, first:last].T.tolist()]
        documents, tokens = zip(*read, strict=True)
        return list(documents), list(tokens)

    def _read(self, number: int, start: int, length: int) -> tuple[OpenDocument, Tokens]:
        end = bisect_right(self._ends, number)
        source = self._sources[end]
        index = number - int(self._ends[end]) + len(source.data)
        last, at, document = self._last or (-1, 0, None)  # reuse a document that spans rows
        if document is None or last != number or at > start:
            at, document = 0, source.open(source.data[index], index)
        document.take(start - at)
        if document.num_left != self.lengths[number] - start:
            raise ValueError(
                f"{source.where(index)}: no longer has the {self.lengths[number]} tokens that were counted at "
                "first; do not change data while a job reads them"
            )
        self._last = number, start + length, document
        tokens = document.ahead(length + 1)  # includes the label of the last token
        document.take(length)
        return document, tokens if self._packing.method != "concat" else tokens.part(0, length)

    # ---- planning ----

    def _count_rows(self) -> NDArray[np.int64]:
        num_passes = math.ceil(self._limits[0]) if len(self._sources) == 1 else 1
        differ = self._packing.method == "fit" and self._sources[0].seed is not None
        passes = np.zeros(num_passes, np.int64)
        for number in range(num_passes) if differ else (0, num_passes - 1):
            pieces = self._go_to(number)
            passes[number:] = pieces[0, -1] + 1 if pieces.size else 0
        return passes

    def _go_to(self, number: int) -> NDArray[np.int64]:
        """Return an epoch's plan, [4, P]: each piece's row in the epoch, document, first token, length."""
        if number != self._number:
            self._number, self._pass = number, self._planned(self._documents_of(number))
        return self._pass

    def _documents_of(self, number: int) -> NDArray[np.int64]:
        documents, due = [], []
        for source, limit, end in zip(self._sources, self._limits, self._ends, strict=True):
            n, order = len(source.data), source.order
            assert order is not None  # every indexed source has an order
            passes = [number] if len(self._sources) == 1 else range(math.ceil(limit))
            own = np.concatenate([order.of_pass(p) for p in passes])
            own = own[: math.ceil(limit * n) - passes[0] * n] + end - n
            lengths = self.lengths[own]
            documents.append(own)
            due.append((np.cumsum(lengths) - lengths / 2) / source.weight)
        return np.concatenate(documents)[np.argsort(np.concatenate(due), kind="stable")]

    def _planned(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths, seq_len = self.lengths[documents], self._packing.seq_len
        ends = np.cumsum(lengths)
        if self._packing.method == "concat":
            # Split the tokens where documents end and where rows begin.
            row_starts = np.arange(0, ends[-1], seq_len + 1)
            cuts = np.sort(np.concatenate([[0], row_starts, ends]), kind="stable")
            begins, sizes = cuts[:-1], np.diff(cuts)
            begins, sizes = begins[sizes > 0], sizes[sizes > 0]
            place = np.searchsorted(ends, begins, side="right")
            starts = begins - (ends - lengths)[place]
            return np.stack([begins // (seq_len + 1), documents[place], starts, sizes])
        num_pieces = -(-lengths // seq_len)
        place = np.repeat(np.arange(len(documents)), num_pieces)
        starts = np.arange(len(place)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        starts *= seq_len
        sizes = np.minimum(lengths[place] - starts, seq_len)
        rows = np.arange(len(place))
        if self._packing.method == "fit":
            content = hashlib.sha256(sizes.tobytes()).hexdigest()
            rows = kept(["fit", seq_len, ROWS_OF_A_BLOCK, content], lambda: fitted(sizes, seq_len))
        pieces = np.stack([rows, documents[place], starts, sizes])
        return pieces[:, np.argsort(rows, kind="stable")]


def fitted(sizes: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return the row index of each piece, [P]: best-fit decreasing bin packing, block by block."""
    rows = np.empty(len(sizes), np.int64)
    blocks = np.cumsum(sizes) // (ROWS_OF_A_BLOCK * seq_len)
    first_row = 0
    for block in np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(blocks)) + 1):
        longest_first = block[np.argsort(-sizes[block], kind="stable")]
        spaces: list[int] = []  # sorted; free tokens of a row << 32 | index of the row
        longest: list[int] = []  # row -> its longest piece
        row_of = []
        for piece, size in zip(longest_first.tolist(), sizes[longest_first].tolist(), strict=True):
            place = bisect_left(spaces, size << 32)
            if place < len(spaces):
                left = spaces.pop(place)
                row, left = left & 0xFFFFFFFF, (left >> 32) - size
            else:
                row, left = len(longest), seq_len - size
                longest.append(piece)
            row_of.append(row)
            if left:
                insort(spaces, left << 32 | row)
        # Order rows by the position of their longest piece, so that rows of short pieces are spread out.
        in_order = np.argsort(np.argsort(np.array(longest, np.int64)))
        rows[longest_first] = first_row + in_order[row_of]
        first_row += len(longest)
    return rows


class PlannedStream:
    """Reads row `number` of each planned step of `num_lanes` rows; has the interface of `RowStream`."""

    def __init__(self, plan: Plan, packing: Packing, number: int, num_lanes: int) -> None:
        self._plan, self._packing = plan, packing
        self._number, self._num_lanes = number, num_lanes
        self._first = 0  # index of the next step's first row

    def next_row(self) -> Row | None:
        """Return the next row: padding after the plan's last row, None after the last step."""
        if self.num_steps_left() == 0:
            return None
        row = self._first + self._number
        self._first += self._num_lanes
        return self._packing.row(*self._plan.pieces(row))

    def num_steps_left(self) -> int:
        return max(0, -(-(self._plan.num_rows - self._first) // self._num_lanes))

    def state(self) -> tuple[Any, ...]:
        return [], [(self._first, 0, [])], []

    def load(self, state: tuple[Any, ...]) -> None:
        first, num_steps, _ = state[1][0]
        self._first = first + num_steps * self._num_lanes


# ---- token counts, cached for later runs ----

_SECONDS_BETWEEN_REPORTS = 10
_TEXTS_AT_ONCE = 64  # batches of 1,024 texts take a fifth more CPU time


def count_tokens(source: Source) -> NDArray[np.int64]:
    """Return each document's token counts [N, 3]: kept, trained, before truncation. Collective."""
    if source.counts is None:
        source.counts = _all_counts(source)
    return source.counts


def _all_counts(source: Source) -> NDArray[np.int64]:
    if hasattr(source.data, "lengths"):
        return np.repeat(np.asarray(source.data.lengths, np.int64)[:, None], 3, axis=1)
    made_with = tokenizer_hash(source.tokenizer) or repr(source.tokenizer)
    key = [source.name, source.path, len(source.data), record_of(source.path), made_with]
    key.append(getattr(source.encode, "key", None))
    key.append(getattr(source.tokenizer, "begins_documents", None))
    cached = _read(key)
    if all(all_ranks(cached is not None and cached.shape == (len(source.data), 3))):
        return cached
    counts = np.zeros((len(source.data), 3), np.int64)
    for rank, counted in enumerate(on_all_ranks(lambda: _count(source))):
        counts[rank :: num_ranks()] = counted
    return kept(key, lambda: counts, again=True)


def _count(source: Source) -> NDArray[np.int64]:
    indices = range(_rank(), len(source.data), num_ranks())
    counts = np.zeros((len(indices), 3), np.int64)
    own = source.tokenizer
    backend = own.tokenizer if type(own) is HuggingFaceTokenizer else None
    texts: dict[int, str] = {}  # short texts, encoded as a batch on all processors
    if backend is not None:  # number of begin- and end-of-text ids that `backend` does not add
        num_ends = len(own.encode("", add_bos=own.begins_documents, add_eos=True))
        num_ends -= len(backend.encode("").ids)
    reported = time.monotonic()
    for i, index in enumerate(indices):
        sample = source.data[index]
        if hasattr(source.encode, "count"):
            counts[i] = source.checked(source.encode.count, sample, index)
        else:
            document = source.open(sample, index)
            if backend is not None and document.text and len(document.text) <= PIECE_CHARACTERS:
                texts[i] = document.text
            else:
                counts[i] = document.num_left
        if len(texts) == _TEXTS_AT_ONCE or (texts and i + 1 == len(indices)):
            encodings = backend.encode_batch_fast(list(texts.values()))
            lengths = np.array([len(encoding.ids) for encoding in encodings])
            counts[list(texts)] = lengths[:, None] + num_ends
            texts = {}
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            logger.info(f"counting tokens: {i + 1:,} of {len(indices):,} documents of this rank")
    return counts


def kept(key: object, make: Callable[[], NDArray[Any]], again: bool = False) -> NDArray[Any]:
    """Return the cached array of this key, else cache and return `make()`. again: always call `make`."""
    if not again and (numbers := _read(key)) is not None:
        return numbers
    numbers, path = make(), _file_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(file, numbers)
    except OSError as error:
        logger.warning(f"the counts of tokens cannot be saved for later runs in {path}: {error}")
    return numbers


def _read(key: object) -> NDArray[Any] | None:
    path = _file_of(key)
    try:
        with open_file(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            return content["arr_0"]
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy and zipfile raise errors of many types
        logger.warning(
            f"the counts of tokens in {path} are damaged, so the tokens are counted again: {error}"
        )
    return None


def _file_of(key: object) -> Path:
    return cache_folder() / f"counts_{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.npz"
