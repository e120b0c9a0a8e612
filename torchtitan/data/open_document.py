"""A document that is being read, and tokenized on first use."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger, warn_once

# Longer texts are tokenized in pieces, because the tokenizer needs about 150 bytes per character.
PIECE_CHARACTERS = 128 * 1024
_MAX_CUTS_TRIED = 64
_COMPARED_CHARACTERS = 256  # tokenized on either side of a cut, to check that no token changes


class Tokens(NamedTuple):
    """Tokens of a document, or of a part of it.

    ids: [n] integers. trained: [n] bool, True for labels of the loss; None: all tokens are labels.
    split: index of the first token of a preference pair's second part. reference: the reference model's
    summed log-probs of the two answers, if the data have them.
    """

    ids: NDArray[Any]
    trained: NDArray[np.bool_] | None = None
    split: int | None = None
    reference: tuple[float, float] | None = None

    def part(self, start: int, end: int) -> "Tokens":
        if start == 0 and end >= len(self.ids):
            return self
        return Tokens(
            self.ids[start:end], None if self.trained is None else self.trained[start:end]
        )

    def halves(self) -> "tuple[Tokens, Tokens]":
        """Return the two parts of a preference pair."""
        assert self.split is not None
        return self.part(0, self.split), self.part(self.split, len(self.ids))


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

    # Number in the source; None if the source is streamed; a saved position then holds the text.
    number: int | None
    tokenizer: BaseTokenizer
    text: str | None = None
    tokens: Tokens | None = None
    used: int = 0  # the number of tokens that have been taken
    source: int = 0  # index of the source in a mixture
    index: int = -1  # index of the document in the data set; -1 if streamed

    def _all_tokens(self) -> Tokens:
        if self.tokens is None:
            self.tokens = join([Tokens(ids) for ids in pieces_of(self.text or "", self.tokenizer)])
            if self.number is not None:  # drop the text, because many documents may be open
                self.text = None
        return self.tokens

    @property
    def num_left(self) -> int:
        """The number of tokens that have not been taken."""
        return len(self._all_tokens().ids) - self.used

    def ahead(self, n: int) -> Tokens:
        """Return the next n tokens, or all that remain, without taking them."""
        return self._all_tokens().part(self.used, self.used + n)

    def take(self, n: int) -> Tokens:
        taken = self.ahead(n)
        self.used += len(taken.ids)
        return taken

    def place(self) -> tuple[int, ...] | dict[str, Any]:
        """Return the position for a checkpoint: (source, number, 0, used), or a dict if streamed."""
        if self.number is not None:
            return self.source, self.number, 0, self.used
        if self.text is not None:
            return {"source": self.source, "text": self.text, "used": self.used}
        left = self.ahead(self.num_left)
        place = {"source": self.source, "tokens": left.ids.tolist()}
        return place | ({} if left.trained is None else {"trained": left.trained.tolist()})


def pieces_of(text: str, tokenizer: BaseTokenizer) -> Iterator[NDArray[np.int32]]:
    """Yield a text's token ids piece by piece; a text of up to `PIECE_CHARACTERS` is one piece."""
    start, end = 0, -1
    while end < len(text):
        start, end = max(end, 0), _end_of_piece(text, max(end, 0), tokenizer)
        yield np.asarray(
            _encode(text[start:end], tokenizer, start == 0, end == len(text)), np.int32
        )


def _encode(text: str, tokenizer: BaseTokenizer, is_first: bool, is_last: bool) -> list[int]:
    add_bos = is_first and getattr(tokenizer, "begins_documents", True)
    tokens = tokenizer.encode(text, add_bos=add_bos, add_eos=is_last)
    # The post-processor of some tokenizers adds begin- and end-of-text ids to every text.
    if not is_first and getattr(tokenizer, "hf_adds_bos", False):
        tokens = tokens[1:]
    if not is_last and getattr(tokenizer, "hf_adds_eos", False):
        tokens = tokens[:-1]
    return tokens


def _end_of_piece(text: str, start: int, tokenizer: BaseTokenizer) -> int:
    """Return an index between words where a cut changes no token; if none is found, warn and cut anyway."""
    latest = start + PIECE_CHARACTERS
    if latest >= len(text):
        return len(text)
    # Search one character further, because the regex takes the end of the range for a word boundary.
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
