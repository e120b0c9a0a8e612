"""The order of a data set's documents: as they are, or a new permutation in each pass."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Order:
    """Maps the numbers of documents, which count on from pass to pass, to indices in a data set.

    Number n is read in pass n // N, over N documents. seed: None keeps the order of the data set.
    A pass is a permutation that takes no memory: a Feistel network of 8 rounds over the next power of
    four, whose results beyond N are mapped again until they fall below N ("cycle walking", Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    num_documents: int
    seed: str | None = None

    def index(self, number: int) -> int:
        pass_number, index = divmod(number, self.num_documents)
        if self.seed is None:
            return index
        keys = _round_keys(self.seed, pass_number)
        while (index := self._permuted(index, keys)) >= self.num_documents:
            pass
        return index

    def of_pass(self, pass_number: int) -> NDArray[np.int64]:
        """Return the indices of all documents in the order of a pass."""
        indices = np.arange(self.num_documents, dtype=np.uint64)
        if self.seed is not None:
            keys = _round_keys(self.seed, pass_number)
            beyond = np.ones(len(indices), bool)
            while beyond.any():
                indices[beyond] = self._permuted(indices[beyond], keys)
                beyond = indices >= self.num_documents
        return indices.astype(np.int64)

    def _permuted(self, index: Any, keys: list[int]) -> Any:
        half_bits = max(3, -(-(self.num_documents - 1).bit_length() // 2))
        mask = (1 << half_bits) - 1
        left, right = index >> half_bits, index & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half_bits | right


@lru_cache(64)  # lanes may be in different passes
def _round_keys(seed: str, pass_number: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed} {pass_number}".encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mixed(x: Any) -> Any:
    """Return 64 bits that all depend on all bits of x: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _WORD
    return x ^ x >> 31
