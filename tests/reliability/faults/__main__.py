"""Print what can go wrong, with cause and remedy: `python -m tests.reliability.faults [WORDS ...]`.

With WORDS, such as a part of a message, only the faults that contain them.
"""

import sys

from tests.reliability.faults import Row, read_book, says


def find(words: str) -> list[Row]:
    """Return the faults that contain the words, or whose message the words contain."""
    return [row for row in read_book() if says(str(row), words) or says(words, row.message)]


if __name__ == "__main__":
    rows = find(" ".join(sys.argv[1:]))
    print("\n\n".join(map(str, rows)) or "no fault contains these words")
