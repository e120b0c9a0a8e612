"""A document that is being read: it is encoded a piece at a time."""

import re
from dataclasses import dataclass, field
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger, warn_once

# Longer texts are encoded in pieces of at most this many characters, to bound the tokenizer's
# memory of some 150 bytes per character.
PIECE_CHARACTERS = 128 * 1024
_MAX_CUTS_TRIED = 64
_COMPARED_CHARACTERS = 256  # on either side of a cut


@dataclass
class OpenDocument:
    """A document and how far it is read."""

    # Index in the source, which can give the text again; None in a stream, where the unread rest
    # is part of the saved position.
    number: int | None
    text: str = ""  # all of it, or in a stream what is left behind the piece
    start: int = 0  # of the piece of the text that became `tokens`
    end: int = -1  # of that piece; -1 before the first one
    tokens: list[int] = field(default_factory=list)
    used: int = 0  # how many of `tokens` have been taken
    is_begun: bool = False  # `text` does not start with the document's beginning

    @property
    def is_finished(self) -> bool:
        return self.used == len(self.tokens) and self.end >= len(self.text)

    def take(self, n: int, tokenizer: BaseTokenizer) -> list[int]:
        """The next n tokens, or all that are left."""
        taken: list[int] = []
        while len(taken) < n and not self.is_finished:
            if self.used == len(self.tokens):
                self.open_piece(max(self.end, 0), tokenizer)
            new = self.tokens[self.used : self.used + n - len(taken)]
            self.used += len(new)
            taken += new
        return taken

    def open_piece(self, start: int, tokenizer: BaseTokenizer) -> None:
        """Encode the piece that begins at the character `start`."""
        self.start, self.end = start, _end_of_piece(self.text, start, tokenizer)
        is_first, is_last = start == 0 and not self.is_begun, self.end == len(self.text)
        text = self.text[self.start : self.end]
        self.tokens, self.used = _encode(text, tokenizer, is_first, is_last), 0
        if self.number is None:
            # A saved position holds the rest: cut it off once for each piece, not for each batch.
            self.text = self.text[self.end :]
            self.start, self.end, self.is_begun = 0, 0, True

    def place(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        if self.number is not None:
            return {"number": self.number, "start": self.start, "used": self.used}
        return {
            "tokens": self.tokens[self.used :],
            "text": self.text[max(self.end, 0) :],
            "is_begun": self.is_begun or self.end > 0,
        }


def _encode(text: str, tokenizer: BaseTokenizer, is_first: bool, is_last: bool) -> list[int]:
    """Token ids; the begin- and end-of-text ids belong to the first and the last piece."""
    tokens = tokenizer.encode(text, add_bos=is_first, add_eos=is_last)
    # The post-processor of some tokenizers always adds them.
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
    # One character more than is looked at: the end of what is searched counts as a word's end.
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
        f"a document of {len(text):,} characters has no place near each {PIECE_CHARACTERS:,} "
        "characters where it can be cut without a trace; a token or two at each cut differ from "
        "those of the uncut text",
    )
    return latest
