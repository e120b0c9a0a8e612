"""A document that is being read: its tokens, made one piece of text at a time."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger, warn_once

# Longer texts are tokenized in pieces: the tokenizer needs some 150 bytes of memory per character.
PIECE_CHARACTERS = 128 * 1024
_MAX_CUTS_TRIED = 64
_COMPARED_CHARACTERS = 256  # on either side of a cut


class Tokens(NamedTuple):
    """Tokens of a document, or of a part of it.

    ids: [n] integers. trained: [n], the tokens that the loss counts as labels; None: all tokens.
    """

    ids: NDArray[Any]
    trained: NDArray[np.bool_] | None = None

    def part(self, start: int, end: int) -> "Tokens":
        return Tokens(
            self.ids[start:end], None if self.trained is None else self.trained[start:end]
        )


def join(parts: Sequence[Tokens]) -> Tokens:
    """Return the tokens of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
    if all(part.trained is None for part in parts):
        return Tokens(ids)
    trained = [np.ones(len(p.ids), bool) if p.trained is None else p.trained for p in parts]
    return Tokens(ids, np.concatenate(trained))


@dataclass
class OpenDocument:
    """A document, and the position up to which its tokens have been taken."""

    # In the source; None in a stream, whose saved position holds the rest of the document.
    number: int | None
    tokenizer: BaseTokenizer
    # Emptied once all of it is tokenized; in a stream, only the text behind the pieces.
    text: str = ""
    end: int = -1  # the characters of the text that are in pieces; -1: the document is not begun
    # Tokens that are not taken yet: (number of the piece's first character, its tokens).
    pieces: deque[tuple[int, Tokens]] = field(default_factory=deque)
    used: int = 0  # the number of tokens of the first piece that have been taken
    available: int = 0  # the number of tokens in pieces that have not been taken
    is_begun: bool = False  # `text` does not start with the document's beginning
    source: int = 0  # the number of the source in a mixture
    index: int = -1  # of the document in the data set; -1 in a stream

    @classmethod
    def from_tokens(
        cls, number: int | None, tokenizer: BaseTokenizer, tokens: Tokens, source: int = 0
    ) -> "OpenDocument":
        pieces, n = deque([(0, tokens)]), len(tokens.ids)
        return cls(number, tokenizer, end=0, pieces=pieces, available=n, source=source)

    def num_ahead(self, n: int) -> int:
        """Return the number of remaining tokens, at most n."""
        while self.available < n and self.end < len(self.text):
            self._read_piece(max(self.end, 0))
        return min(n, self.available)

    def estimated_length(self) -> int:
        """Return the number of the document's tokens, estimated by the first piece of a longer text."""
        self.num_ahead(1)
        num_unread = len(self.text) - max(self.end, 0)
        return self.available + self.available * num_unread // PIECE_CHARACTERS

    def ahead(self, n: int) -> Tokens:
        """Return the next n tokens, or all that remain, without taking them."""
        self.num_ahead(n)
        parts: list[Tokens] = []
        start = self.used
        for _, piece in self.pieces:
            parts.append(piece.part(start, start + n))
            n -= len(parts[-1].ids)
            if n <= 0:
                break
            start = 0
        return join(parts)

    def take(self, n: int) -> Tokens:
        taken = self.ahead(n)
        self.used += len(taken.ids)
        self.available -= len(taken.ids)
        while len(self.pieces) > 1 and self.used >= len(self.pieces[0][1].ids):
            self.used -= len(self.pieces.popleft()[1].ids)
        return taken

    @property
    def is_finished(self) -> bool:
        return self.end >= len(self.text) and not self.available

    def _read_piece(self, start: int) -> None:
        self.end = _end_of_piece(self.text, start, self.tokenizer)
        is_first, is_last = start == 0 and not self.is_begun, self.end == len(self.text)
        ids = _encode(self.text[start : self.end], self.tokenizer, is_first, is_last)
        if not self.available:
            self.pieces.clear()
            self.used = 0
        self.pieces.append((start, Tokens(np.asarray(ids, np.int32))))
        self.available += len(ids)
        if is_last:
            self.text, self.end = "", 0  # many documents may be open at the same time
        elif self.number is None:
            # A saved position holds the rest, which is cut off once per piece, not once per batch.
            self.text, self.end, self.is_begun = self.text[self.end :], 0, True

    def reopen(self, start: int, used: int) -> None:
        """Go to a position that was saved: a piece's first character, and its tokens taken."""
        if not self.pieces:
            self.end = start or -1
        self.num_ahead(used + 1)
        self.used = min(used, self.available)
        self.available -= self.used

    def place(self) -> tuple[int, ...] | dict[str, Any]:
        """Return the position for a checkpoint: (source, number, first character, tokens taken)."""
        start = self.pieces[0][0] if self.pieces else max(self.end, 0)
        if self.number is not None:
            return self.source, self.number, start, self.used
        unread = self.ahead(self.available)
        place: dict[str, Any] = {"source": self.source, "tokens": unread.ids.tolist()}
        if unread.trained is not None:
            place["trained"] = unread.trained.tolist()
        text = self.text[max(self.end, 0) :]
        return place | {"text": text, "is_begun": self.is_begun or self.end >= 0}


def _encode(text: str, tokenizer: BaseTokenizer, is_first: bool, is_last: bool) -> list[int]:
    add_bos = is_first and getattr(tokenizer, "begins_documents", True)
    tokens = tokenizer.encode(text, add_bos=add_bos, add_eos=is_last)
    # The post-processor of some tokenizers adds these ids to every text.
    if not is_first and getattr(tokenizer, "hf_adds_bos", False):
        tokens = tokens[1:]
    if not is_last and getattr(tokenizer, "hf_adds_eos", False):
        tokens = tokens[:-1]
    return tokens


def _end_of_piece(text: str, start: int, tokenizer: BaseTokenizer) -> int:
    """Return a place between words where cutting the text does not change the tokens."""
    latest = start + PIECE_CHARACTERS
    if latest >= len(text):
        return len(text)
    # Search one character more, because the end of the searched text always counts as a word's end.
    words = re.compile(r"\b").finditer(text, latest - PIECE_CHARACTERS // 32, latest + 1)
    cuts = [match.start() for match in words if match.start() <= latest]
    for cut in cuts[: -_MAX_CUTS_TRIED - 1 : -1]:
        left = text[max(start, cut - _COMPARED_CHARACTERS) : cut]
        right = text[cut : cut + _COMPARED_CHARACTERS]
        apart = _encode(left, tokenizer, False, False) + _encode(right, tokenizer, False, False)
        if apart == _encode(left + right, tokenizer, False, False):
            return cut
    warn_once(
        logger,
        f"a document of {len(text):,} characters is tokenized in pieces of {PIECE_CHARACTERS:,}, and "
        "one or two tokens at a cut differ from those of the uncut text",
    )
    return latest
