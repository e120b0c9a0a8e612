"""Which documents each reader takes, and how the rest is dealt to another number of readers.

Documents are numbered without end: number n is document n % N of pass n // N over N documents.
A reader is one data worker of one data-parallel rank. Reader s of S takes `base + s`,
`base + s + S`, `base + s + 2 * S`, ...; readers of long documents fall behind the others.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class DocumentShare:
    """One reader's documents and how far it got."""

    reader: int  # s above
    num_readers: int  # S above
    base: int = 0  # number at which the readers' strides begin
    num_taken: int = 0  # documents taken from the stride
    # Numbers below `base` that earlier readers left, ascending; they are taken first.
    pending: deque[int] = field(default_factory=deque)

    @property
    def next_in_stride(self) -> int:
        return self.base + self.reader + self.num_taken * self.num_readers

    def peek(self) -> int:
        """Return the number of the next document, which `advance` counts as taken."""
        return self.pending[0] if self.pending else self.next_in_stride

    def advance(self) -> None:
        if self.pending:
            self.pending.popleft()
        else:
            self.num_taken += 1

    def not_taken_below(self, limit: int) -> list[int]:
        return [*self.pending, *range(self.next_in_stride, limit, self.num_readers)]


def deal_again(shares: list[DocumentShare], num_readers: int) -> list[DocumentShare]:
    """Return shares of `num_readers` new readers that together hold what the old ones left.

    No document is lost and none comes twice. The new strides begin where the old reader that
    got furthest would have continued; what the slower ones left below is dealt out one by one.
    """
    base = max(share.next_in_stride for share in shares)
    left = sorted(number for share in shares for number in share.not_taken_below(base))
    return [
        DocumentShare(reader, num_readers, base, pending=deque(left[reader::num_readers]))
        for reader in range(num_readers)
    ]
