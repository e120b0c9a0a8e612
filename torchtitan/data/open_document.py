"""A document that is being read, and tokenized one piece at a time."""

import re
from dataclasses import dataclass, field
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger, warn_once

# Longer texts are tokenized in pieces of at most this many characters, because the tokenizer needs
# some 150 bytes of memory per character.
PIECE_CHARACTERS = 128 * 1024
_MAX_CUTS_TRIED = 64
_COMPARED_CHARACTERS = 256  # on either side of a cut


@dataclass
class OpenDocument:
    """A document, and the position up to which it has been read."""

    # Index in the source, from which the text can be read again; None in a stream, whose saved
    # position holds the unread text.
    number: int | None
    text: str = ""  # the whole text; in a stream, the text behind the current piece
    start: int = 0  # of the current piece, in characters of the text
    end: int = -1  # of the current piece; -1 before the first piece
    tokens: list[int] = field(default_factory=list)  # of the current piece
    used: int = 0  # the number of `tokens` that have been taken
    is_begun: bool = False  # `text` does not start with the document's beginning

    @property
    def is_finished(self) -> bool:
        return self.used == len(self.tokens) and self.end >= len(self.text)

    def take(self, n: int, tokenizer: BaseTokenizer) -> list[int]:
        """Return the next n tokens, or all remaining ones if they are fewer."""
        taken: list[int] = []
        while len(taken) < n and not self.is_finished:
            if self.used == len(self.tokens):
                self.open_piece(max(self.end, 0), tokenizer)
            new = self.tokens[self.used : self.used + n - len(taken)]
            self.used += len(new)
            taken += new
        return taken

    def open_piece(self, start: int, tokenizer: BaseTokenizer) -> None:
        """Tokenize the piece that begins at the character `start`."""
        self.start, self.end = start, _end_of_piece(self.text, start, tokenizer)
        is_first, is_last = start == 0 and not self.is_begun, self.end == len(self.text)
        text = self.text[self.start : self.end]
        self.tokens, self.used = _encode(text, tokenizer, is_first, is_last), 0
        if self.number is None:
            # A saved position holds the rest, which is cut off once per piece, not once per batch.
            self.text = self.text[self.end :]
            self.start, self.end, self.is_begun = 0, 0, True

    def place(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        if self.number is not None:
            return {"number": self.number, "start": self.start, "used": self.used}
        return {
            "tokens": self.tokens[self.used :],
            "text": self.text[max(self.end, 0) :],
            "is_begun": self.is_begun or self.end > 0,
        }


def _encode(text: str, tokenizer: BaseTokenizer, is_first: bool, is_last: bool) -> list[int]:
    """Return token ids; only the first piece has a begin-of-text id, the last an end-of-text id."""
    tokens = tokenizer.encode(text, add_bos=is_first, add_eos=is_last)
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
        "no place was found where a cut changes no token; one or two tokens at such a cut differ "
        "from those of the uncut text",
    )
    return latest
