"""Row streams: each row of the global batch has a stream that reads and packs its own documents.

The global batch has G rows. Stream g fills row g of every step with the documents numbered g, g + G,
g + 2 G, ... of each source, so a row depends only on the config and the data, not on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX, PADDING, SAMPLE_IDS
from torchtitan.data.document_sources import BEGIN_AGAIN, Source
from torchtitan.data.open_document import OpenDocument, Tokens, join

# After this many consecutive documents without a token, the dataset is reported as empty.
MAX_EMPTY_DOCUMENTS_IN_A_ROW = 100_000
# Packing "fit" chooses among this many documents. For log-normal lengths (sigma 1) with a mean of up to
# 0.45 rows, at most 1.5 % of the tokens are padding; a window of 24 saves another 0.2 %.
WINDOW = 16
# Limit on the documents in the windows of all streams together; each window has at least 3.
MOST_IN_WINDOWS = 8192

Row = tuple[dict[str, Tensor], Tensor]
"""(input_dict, labels) of one row, without a batch dimension."""


@dataclass(frozen=True)
class Packing:
    """How documents are packed into rows of T = `seq_len` tokens.

    "concat": end to end. A row takes T + 1 tokens; its labels are the last T of them.
    "fit": whole documents, the best fit among the next `WINDOW`; only documents longer than T are split.
    "none": one document per row; a document longer than T fills several rows.

    Rows are padded with `padding_id`. positions (from 0 in each document), document_ids, sources
    (indices in the mixture), pair_ids, ref_logprobs: whether rows get these entries [T].

    pair_ids: documents are preference pairs, whose parts are two documents of the row. Labels of the row's
    pair k, counted from 1, get k in the chosen part and -k in the rejected part; other labels get 0.
    ref_logprobs: [T] fp32, the reference model's log-prob of an answer at its last label, 0 elsewhere.
    """

    method: Literal["concat", "fit", "none"] = "concat"
    seq_len: int = 2048
    padding_id: int = 0
    positions: bool = False
    document_ids: bool = False
    sources: bool = False
    pair_ids: bool = False
    ref_logprobs: bool = False

    def row(self, documents: Sequence[OpenDocument], parts: Sequence[Tokens]) -> Row:
        """Return a row made of parts of documents; without parts, a row of padding.

        parts: at most T + 1 tokens in total. Token T + 1 is used only as a label.
        """
        if self.pair_ids:
            documents = [document for document in documents for _ in range(2)]
            reference = [x for pair in parts for x in pair.reference or ()]
            parts = [part for pair in parts for part in pair.halves()]
        tokens = join(parts)
        labels = tokens.ids[1:].astype(np.int64)
        if tokens.trained is not None:
            labels[~tokens.trained[1:]] = IGNORE_INDEX
        row = {"input": self._filled(tokens.ids, self.padding_id)}
        if self.method != "concat" or self.positions or self.document_ids or self.sources:
            lengths = np.array([len(part.ids) for part in parts], np.int64)
            ends = lengths.cumsum()
        if self.method != "concat":
            labels[ends[:-1] - 1] = IGNORE_INDEX
        if self.positions:
            positions = np.arange(len(tokens.ids)) - (ends - lengths).repeat(lengths)
            row["positions"] = self._filled(positions, PADDING)
        if self.document_ids:
            row["document_ids"] = self._filled(np.arange(len(parts)).repeat(lengths), PADDING)
        if self.sources:
            sources = np.array([document.source for document in documents], np.int64)
            row["sources"] = self._filled(sources.repeat(lengths), 0)
        ends_of_row = [documents[0].index, documents[-1].index] if documents else [-1, -1]
        # `from_numpy` is several times as fast as `torch.tensor`.
        row[SAMPLE_IDS] = torch.from_numpy(np.array(ends_of_row))
        row_labels = self._filled(labels, IGNORE_INDEX)
        if self.pair_ids:
            sides = np.arange(2, len(parts) + 2) // 2 * np.resize([1, -1], len(parts))
            ids = self._filled(sides.repeat(lengths), 0)
            row["pair_ids"] = ids.masked_fill(row_labels == IGNORE_INDEX, 0)
        if self.ref_logprobs:
            sums = np.zeros(self.seq_len, np.float32)
            for part, start, value in zip(parts, ends - lengths, reference, strict=True):
                sums[start + np.flatnonzero(part.trained)[-1] - 1] = value
            row["ref_logprobs"] = torch.from_numpy(sums)
        return row, row_labels

    def _filled(self, numbers: NDArray[Any], padding: int) -> Tensor:
        """Return numbers truncated or padded to [T] int64."""
        filled = np.full(self.seq_len, padding, np.int64)
        filled[: len(numbers)] = numbers[: self.seq_len]
        return torch.from_numpy(filled)


class RowStream:
    """Reads and packs the documents of stream `number` of `num_streams`: g and G in the module docstring."""

    def __init__(
        self, sources: Sequence[Source], packing: Packing, number: int, num_streams: int
    ) -> None:
        self._packing = packing
        self._sources = sources
        self.feeds = [source.feed(number, num_streams) for source in sources]
        self.num_tokens = [0] * len(sources)  # tokens of the documents opened so far, by source
        self._phase = (number + 0.5) / num_streams
        self._window = min(WINDOW, max(3, MOST_IN_WINDOWS // num_streams))
        self.open: list[OpenDocument] = []  # opened documents with tokens left

    def next_row(self) -> Row | None:
        """Return the next row; None at the end of the documents."""
        pieces = self._end_to_end() if self._packing.method == "concat" else self._best_fit()
        return self._packing.row(*zip(*pieces, strict=True)) if pieces else None

    def state(self) -> tuple[Any, ...]:
        """Return the position for a checkpoint; an open document with no token taken is stored as one integer."""
        places: list[Any] = []
        lengths: list[int] = []  # tokens left in documents stored as one integer
        for document in self.open:
            if document.num_left:
                place = document.place()
                if not isinstance(place, dict) and place[2:] == (0, 0):
                    place = place[1] * len(self._sources) + place[0]
                    lengths.append(document.num_left)
                places.append(place)
        return places, [feed.state() for feed in self.feeds], list(self.num_tokens), lengths

    def load(self, state: tuple[Any, ...]) -> None:
        places, feeds, self.num_tokens, *rest = state
        lengths = iter(rest[0] if rest else [])  # `PackedDataset._dealt_again` omits lengths
        for feed, saved in zip(self.feeds, feeds, strict=True):
            feed.load(saved)
        self.open = []
        for place in places:
            length = 0
            if isinstance(place, int):
                place = (*divmod(place, len(self._sources))[::-1], 0, 0)
                length = next(lengths, 0)
            source = self._sources[place["source"] if isinstance(place, dict) else place[0]]
            document = source.reopen(place)
            if length and document.num_left != length:
                raise ValueError(
                    f"{source.where(document.index)}: had {length} tokens when the data position was saved, "
                    f"and has {document.num_left}; resume with the same data and tokenizer, or {BEGIN_AGAIN}"
                )
            self.open.append(document)

    def _end_to_end(self) -> list[tuple[OpenDocument, Tokens]]:
        """Take and return the next T + 1 tokens; if fewer are left, keep them in `open` and return []."""
        pieces: list[tuple[OpenDocument, Tokens]] = []
        missing = self._packing.seq_len + 1
        while missing:
            if not self.open:
                document = self._next_document()
                if document is None:
                    if pieces:
                        rest = join([tokens for _, tokens in pieces])
                        tokenizer = pieces[0][0].tokenizer
                        self.open.append(OpenDocument(None, tokenizer, tokens=rest))
                    return []
                self.open.append(document)
            document = self.open[0]
            tokens = document.take(missing)
            missing -= len(tokens.ids)
            if len(tokens.ids):
                pieces.append((document, tokens))
            if not document.num_left:
                self.open.pop(0)
        return pieces

    def _best_fit(self) -> list[tuple[OpenDocument, Tokens]]:
        """Return pieces that fill a row: a source's oldest open document, then the longest ones that fit."""
        seq_len = self._packing.seq_len
        window = self._window if self._packing.method == "fit" else 1
        lengths = [document.num_left for document in self.open]
        space, pieces = seq_len, []
        while space:
            while len(self.open) < window and (document := self._next_document()) is not None:
                self.open.append(document)
                lengths.append(document.num_left)
            if not self.open:
                break
            index = 0 if pieces else self._first()
            if pieces:
                fitting = [(n, -i) for i, n in enumerate(lengths) if n <= space]
                if not fitting or window == 1:
                    break
                index = -max(fitting)[1]
            document = self.open[index]
            # One more token than fits: the label of the last token of a split document.
            pieces.append((document, document.ahead(space + 1)))
            document.take(space)
            space -= min(lengths[index], space)
            if not document.num_left:
                del self.open[index], lengths[index]
        return pieces

    def _first(self) -> int:
        """Return the index of the open document that begins a row."""
        oldest: dict[int, int] = {}  # source -> index of its oldest open document
        for index, document in enumerate(self.open):
            oldest.setdefault(document.source, index)
        candidates = {source: self.open[index] for source, index in oldest.items()}
        return oldest[self._furthest_behind(candidates, share_of_open=0)]

    def _next_document(self) -> OpenDocument | None:
        """Open the next document that has tokens; None at the end of the documents."""
        for _ in range(MAX_EMPTY_DOCUMENTS_IN_A_ROW):
            documents = {
                i: d for i, feed in enumerate(self.feeds) if (d := feed.peek()) is not None
            }
            if not documents:
                return None
            number = self._furthest_behind(documents, share_of_open=0.5)
            self.feeds[number].advance()
            if documents[number].num_left:
                if len(self.feeds) > 1:
                    self.num_tokens[number] += documents[number].num_left
                return documents[number]
        source = self._sources[number]
        raise ValueError(
            f"dataset {source.name!r}{source.path and f' in {source.path}'}: "
            f"{MAX_EMPTY_DOCUMENTS_IN_A_ROW} consecutive documents gave no tokens, because they are empty "
            "or training.too_long leaves them out; give it other documents, or raise training.seq_len"
        )

    def _furthest_behind(self, candidates: dict[int, OpenDocument], share_of_open: float) -> int:
        """Return the index of the source that is furthest below its share of all tokens.

        candidates: source index -> its next document, for each source with a document left.
        share_of_open: the fraction of the open documents' remaining tokens that counts.
        To make the streams' rounding errors cancel, each has a phase between 0 and 1: the total grows by
        2 * phase rows, and each source's tokens by phase * the length of the source's next document.
        """
        if len(self.feeds) == 1:
            return 0
        num_tokens = list(self.num_tokens)
        for document in self.open:
            num_tokens[document.source] -= round((1 - share_of_open) * document.num_left)
        is_fit, row = self._packing.method == "fit", self._packing.seq_len
        weights = {source: self._sources[source].weight for source in candidates}
        all_weights = sum(weights.values())
        all_tokens = sum(num_tokens[source] for source in candidates) + 2 * self._phase * row

        def excess(source: int) -> float:
            length = candidates[source].num_left
            # With packing "fit", a row takes at most `row` tokens of a document.
            ahead = self._phase * (min(length, row) if is_fit else length)
            return num_tokens[source] + ahead - weights[source] / all_weights * all_tokens

        return min(sorted(candidates), key=excess)
