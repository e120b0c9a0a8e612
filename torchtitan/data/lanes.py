"""Lanes: each row of the global batch is fed by a lane, which reads and packs documents of its own.

The global batch has G rows. Lane g fills row g of every step with the documents number g, g + G,
g + 2 G, ... of each source, so that a row depends on the config and the data only. Ranks, data
workers and microbatches share out the lanes. A run whose lanes are saved goes on with the same rows on
any number of ranks and workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX, PADDING, SAMPLE_IDS
from torchtitan.data.document_share import DocumentShare
from torchtitan.data.document_sources import Source
from torchtitan.data.open_document import OpenDocument, Tokens, join

# After this many documents in a row without a token, the dataset is reported as empty.
MAX_EMPTY_DOCUMENTS_IN_A_ROW = 100_000
# Packing "fit" chooses among this many documents. For log-normal lengths (sigma 1) with a mean of up to
# 0.45 rows, they fill at least 98.5 % of the slots; 24 documents fill 0.2 % more.
WINDOW = 16
# The windows of all lanes together have at most this many documents, but each at least 3.
MOST_IN_WINDOWS = 8192

Row = tuple[dict[str, Tensor], Tensor]
"""(input_dict, labels) of one row, without the dimension of the batch."""


@dataclass(frozen=True)
class Packing:
    """The way documents are laid into rows of T = `seq_len` tokens.

    "concat": end to end. A row is made of T + 1 tokens: its labels are the last T of them.
    "fit": whole documents, chosen by best fit among `WINDOW`; only a document longer than T is cut.
    "none": one document in each row, and a document longer than T in several rows.

    The rows of "fit" and "none" are filled up with `padding_id`. positions, document_ids, sources: put
    these entries into the rows. Positions count from 0 in each document; sources are the numbers of the
    sources of a mixture, by token.
    """

    method: Literal["concat", "fit", "none"] = "concat"
    seq_len: int = 2048
    padding_id: int = 0
    positions: bool = False
    document_ids: bool = False
    sources: bool = False

    def row(self, documents: list[OpenDocument], parts: list[Tokens]) -> Row:
        """Lay parts of documents into a row.

        parts: T + 1 tokens in all for "concat", or fewer at the end of a planned pass. Otherwise each
            part is followed by the document's next token if the document goes on in another row. None:
            a row of padding.
        """
        # T + 1 in all if the last document goes on
        lengths = [len(part.ids) for part in parts]
        if self.method == "concat":
            parts = [join(parts)]
        labels = self._filled([_labels_of(part) for part in parts], IGNORE_INDEX)
        entries = {"input": self._filled([part.ids for part in parts], self.padding_id)}
        if self.positions:
            entries["positions"] = self._filled([np.arange(n) for n in lengths], PADDING)
        if self.document_ids:
            numbers = np.arange(len(lengths), dtype=np.int32)
            ids = np.repeat(numbers, np.array(lengths, np.int64))
            entries["document_ids"] = self._filled([ids], PADDING)
        if self.sources:
            sources = np.array([document.source for document in documents], np.int64)
            entries["sources"] = self._filled([np.repeat(sources, np.array(lengths, np.int64))], 0)
        row = {key: torch.from_numpy(x) for key, x in entries.items()}
        # From numpy, which is several times as fast as torch.tensor.
        ends = [documents[0].index, documents[-1].index] if documents else [-1, -1]
        row[SAMPLE_IDS] = torch.from_numpy(np.array(ends))
        return row, torch.from_numpy(labels)

    def _filled(self, parts: list[NDArray[Any]], padding: int) -> NDArray[np.int64]:
        """Return the parts one after the other, cut or filled up to T."""
        numbers = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
        if len(numbers) >= self.seq_len:
            return numbers[: self.seq_len].astype(np.int64)
        filled = np.full(self.seq_len, padding, np.int64)
        filled[: len(numbers)] = numbers
        return filled


def _labels_of(part: Tokens) -> NDArray[np.int64]:
    """Return the next token of each token of a part, IGNORE_INDEX if it is unknown or not trained."""
    labels = np.empty(len(part.ids), np.int64)
    labels[:-1], labels[-1:] = part.ids[1:], IGNORE_INDEX
    if part.trained is not None:
        labels[:-1][~part.trained[1:]] = IGNORE_INDEX
    return labels


class Lane:
    """Reads one lane's documents of each source, and packs them into rows.

    number, num_lanes: g and G above.
    """

    def __init__(
        self, sources: Sequence[Source], packing: Packing, number: int, num_lanes: int
    ) -> None:
        self._packing = packing
        self._sources = sources
        self.feeds = [source.feed(DocumentShare(number, num_lanes)) for source in sources]
        self.num_tokens = [0] * len(sources)  # of the documents that were opened, by source
        self._phase = (number + 0.5) / num_lanes
        self._window = min(WINDOW, max(3, MOST_IN_WINDOWS // num_lanes))
        self.open: list[OpenDocument] = []  # documents to lay into rows before the sources' next
        self.num_left_over = 0  # tokens at the end of the data, fewer than a row

    def next_row(self) -> Row | None:
        """Return the next row; None if the documents have ended."""
        pieces = self._end_to_end() if self._packing.method == "concat" else self._best_fit()
        return self._packing.row(*zip(*pieces, strict=True)) if pieces else None

    def state(self) -> tuple[Any, ...]:
        """Return the position for a checkpoint, as plain data.

        Many documents wait in the window of "fit". One of which nothing has been taken is a number, and
        its length, so that resuming reads it only when it is laid into a row.
        """
        places: list[Any] = []
        lengths: list[int] = []
        for document in self.open:
            if document.is_finished:
                continue
            place = document.place()
            if not isinstance(place, dict) and place[2:] == (0, 0):
                place = place[1] * len(self._sources) + place[0]
                lengths.append(0 if document.text else document.available)
            places.append(place)
        return places, [feed.state() for feed in self.feeds], list(self.num_tokens), lengths

    def load(self, state: tuple[Any, ...]) -> None:
        places, feeds, self.num_tokens, *rest = state
        for feed, saved in zip(self.feeds, feeds, strict=True):
            feed.load(saved)
        lengths = iter(rest[0] if rest else [])  # none if the lanes were dealt out again
        self.open = [
            self._reopen(place, next(lengths, 0) if isinstance(place, int) else 0)
            for place in places
        ]

    def _reopen(self, place: Any, length: int) -> OpenDocument:
        if isinstance(place, int):
            number, source = divmod(place, len(self._sources))
            if length:
                return self._sources[source].waiting(number, length)
            place = (source, number, 0, 0)
        source = place["source"] if isinstance(place, dict) else place[0]
        return self._sources[source].reopen(place)

    def _end_to_end(self) -> list[tuple[OpenDocument, Tokens]]:
        """Take the next T + 1 tokens. At the end of the data, fewer tokens stay open."""
        pieces: list[tuple[OpenDocument, Tokens]] = []
        missing = self._packing.seq_len + 1
        while missing:
            if not self.open:
                document = self._next_document()
                if document is None:
                    self._keep_rest(pieces)
                    return []
                self.open.append(document)
            document = self.open[0]
            tokens = document.take(missing)
            missing -= len(tokens.ids)
            if len(tokens.ids):
                pieces.append((document, tokens))
            if document.is_finished:
                self.open.pop(0)
        return pieces

    def _keep_rest(self, pieces: list[tuple[OpenDocument, Tokens]]) -> None:
        rest = join([tokens for _, tokens in pieces])
        self.num_left_over = len(rest.ids)
        if pieces:
            self.open.append(OpenDocument.from_tokens(None, pieces[0][0].tokenizer, rest))

    def _best_fit(self) -> list[tuple[OpenDocument, Tokens]]:
        """Take the document that has waited longest, and then the longest document that still fits.

        Of a mixture, the first is a document of the source that is furthest behind.
        """
        seq_len = self._packing.seq_len
        window = self._window if self._packing.method == "fit" else 1
        # A cut document brings the label of its last token along.
        lengths = [document.num_ahead(seq_len + 1) for document in self.open]
        space = seq_len
        pieces = []
        while True:
            while len(self.open) < window and (document := self._next_document()) is not None:
                self.open.append(document)
                lengths.append(document.num_ahead(seq_len + 1))
            if pieces:
                best, index = max(
                    ((n, -i) for i, n in enumerate(lengths) if n <= space), default=(0, 0)
                )
                index = -index
                if not best or window == 1:
                    return pieces
            elif self.open:
                index = self._first()
            else:
                return []
            document = self.open[index]
            pieces.append((document, document.ahead(space + 1)))
            document.take(min(lengths[index], space))
            space -= min(lengths[index], space)
            if document.is_finished:
                del self.open[index], lengths[index]
            if not space:
                return pieces

    def _first(self) -> int:
        """Return the index of the open document that begins a row."""
        oldest: dict[int, int] = {}  # source -> index
        for index, document in enumerate(self.open):
            oldest.setdefault(document.source, index)
        candidates = {source: self.open[index] for source, index in oldest.items()}
        return oldest[self._furthest_behind(candidates, share_of_open=0)]

    def _next_document(self) -> OpenDocument | None:
        """Open the next document that has tokens; None if the documents have ended."""
        for _ in range(MAX_EMPTY_DOCUMENTS_IN_A_ROW):
            documents = {
                i: d for i, feed in enumerate(self.feeds) if (d := feed.peek()) is not None
            }
            if not documents:
                return None
            number = self._furthest_behind(documents, share_of_open=0.5)
            self.feeds[number].advance()
            if documents[number].num_ahead(1):
                if len(self.feeds) > 1:
                    self.num_tokens[number] += documents[number].estimated_length()
                return documents[number]
        source = self._sources[number]
        raise ValueError(
            f"dataset {source.name!r}{source.path and f' in {source.path}'}: "
            f"{MAX_EMPTY_DOCUMENTS_IN_A_ROW} documents in a row gave no tokens, because they are empty "
            "or training.too_long leaves them out; give it other documents, or raise training.seq_len"
        )

    def _furthest_behind(self, candidates: dict[int, OpenDocument], share_of_open: float) -> int:
        """Return the source whose tokens are furthest below its share of all tokens.

        candidates: source -> its next document, of each source that has one left.
        share_of_open: the part of a document waiting for a row that counts. Counted whole, it would
            hold back a source of long documents, which wait longer.

        Compared are the tokens after another row, where each source has a part of its next document.
        These two look-aheads go from 0 to 2 rows, and from 0 to 1 documents, over the lanes, so that
        errors of lanes cancel and the shares are right after few rows.
        """
        if len(self.feeds) == 1:
            return 0
        num_tokens = list(self.num_tokens)
        for document in self.open:
            num_tokens[document.source] -= round((1 - share_of_open) * document.estimated_length())
        is_fit, row = self._packing.method == "fit", self._packing.seq_len
        weights = {source: self._sources[source].weight for source in candidates}
        all_weights = sum(weights.values())
        all_tokens = sum(num_tokens[source] for source in candidates) + 2 * self._phase * row

        def excess(source: int) -> float:
            length = candidates[source].estimated_length()
            ahead = self._phase * (min(length, row) if is_fit else length)  # a row takes no more
            return num_tokens[source] + ahead - weights[source] / all_weights * all_tokens

        return min(sorted(candidates), key=excess)
