"""The division of documents among readers, and of the rest among another number of readers.

Documents are numbered without end: number n is document n % N of pass n // N over N documents.
A reader is a lane (see `lanes.py`). Reader s of S takes the numbers `base + s`, `base + s + S`,
`base + s + 2 * S`, ... A reader that meets long documents falls behind.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class DocumentShare:
    """The documents of one reader, and its progress."""

    reader: int  # s above
    num_readers: int  # S above
    base: int = 0  # number at which the readers' strides begin
    num_taken: int = 0  # documents taken from the stride
    # Numbers below `base` that readers of an earlier run did not take, ascending. They come first.
    pending: deque[int] = field(default_factory=deque)

    @property
    def next_in_stride(self) -> int:
        return self.base + self.reader + self.num_taken * self.num_readers

    def peek(self) -> int:
        """Return the number of the next document, which `advance` marks as taken."""
        return self.pending[0] if self.pending else self.next_in_stride

    def advance(self) -> None:
        if self.pending:
            self.pending.popleft()
        else:
            self.num_taken += 1

    def state(self) -> tuple[int, int, list[int]]:
        """Return the progress as plain data; `resumed` makes a share of it."""
        return self.base, self.num_taken, list(self.pending)

    def resumed(self, state: tuple[int, int, list[int]]) -> "DocumentShare":
        base, num_taken, pending = state
        return DocumentShare(self.reader, self.num_readers, base, num_taken, deque(pending))

    def not_taken_below(self, limit: int) -> list[int]:
        return [*self.pending, *range(self.next_in_stride, limit, self.num_readers)]


def deal_again(shares: list[DocumentShare], num_readers: int) -> list[DocumentShare]:
    """Return shares of `num_readers` new readers of all documents that the old readers did not take.

    No document is lost or repeated. The new strides begin where the fastest old reader would have
    continued. The documents that slower readers did not take below that are dealt out one by one.
    """
    base = max(share.next_in_stride for share in shares)
    not_taken = sorted(number for share in shares for number in share.not_taken_below(base))
    return [
        DocumentShare(reader, num_readers, base, pending=deque(not_taken[reader::num_readers]))
        for reader in range(num_readers)
    ]
