"""Token ids in pairs of `.bin` and `.idx` files in Megatron-LM's format, on a disk or at an address.

Files on a disk are memory-mapped. At an address, indexes and checksums are read at the start, and each
document by a range request on the `.bin` file.

The `.bin` file holds the ids of D documents in S sequences; usually a document is one sequence. The
`.idx` file, little-endian, holds in this order:

- a header (`_HEADER`): magic, version, code of the ids' type, S, D + 1
- int32 [S]: the number of ids of each sequence
- int64 [S]: the byte offset of each sequence in the `.bin` file
- int64 [D + 1]: the index of each document's first sequence, then S

`torchtitan.data.tokenize` adds `tokens.json`, which describes the tokenizer and is marked as finished
when all pairs are complete. It also adds a `.crc32` file to each pair: uint32 [D], the CRC-32 of each
document's bytes, started from the CRC-32 of the pair's name; every read of a document checks it.
"""

import hashlib
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from torchtitan.data.local_files import JoinedDocuments
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools import storage
from torchtitan.tools.files import open_file, read_json_object, whole_file
from torchtitan.tools.logging import logger, warn_once

ABOUT_FILE = "tokens.json"
ABOUT_FORMAT = 1
SUMS = ".crc32"

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
# Type codes of the format; codes 6 and 7 are floats.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_DOCUMENTS_CHECKED = 100  # number of documents that `check_tokenizer` reads
_AGAIN = (
    "copy the folder again, or run the same `torchtitan tokenize` again, which writes "
    "damaged parts again"
)


class TokenDocuments(JoinedDocuments):
    """Documents of token ids: `documents[i]` are the ids [n] of document i.

    path: a folder of pairs; or the path of one pair, with or without the ending `.bin` or `.idx`.
    num_ids: documents with ids outside 0 to num_ids - 1 are refused; `check_tokenizer` may set it.
    Raises ValueError for missing or unfinished files, and when a damaged document is read.
    """

    def __init__(self, path: str, num_ids: int | None = None) -> None:
        self._path, self._num_ids = path, num_ids
        is_folder = storage.is_folder(path)
        self._folder = path if is_folder else os.path.dirname(path)
        self._about = read_about(about_file := storage.join(self._folder, ABOUT_FILE))
        if self._about is not None and self._about["finished"] is not True:
            raise ValueError(
                f"{about_file} says that the folder is unfinished; run the same "
                "`torchtitan tokenize` again, which continues where it stopped"
            )
        self._has_sums = self._about is not None and bool(self._about.get("check_sums"))
        super().__init__([Pair(prefix, self._has_sums) for prefix in _prefixes_of(path)])
        if self._about is not None:
            self._compare_with_about(is_folder)

    def __reduce__(self) -> tuple:
        return TokenDocuments, (self._path, self._num_ids)

    def __getitem__(self, index: int) -> np.ndarray:
        ids = super().__getitem__(index)
        if self._num_ids is not None and len(ids):
            smallest, largest = int(ids.min()), int(ids.max())
            if not 0 <= smallest <= largest < self._num_ids:
                raise ValueError(
                    f"{self.where(index)} has the id {min(smallest, 0) or largest}, and the tokenizer's ids "
                    f"are 0 to {self._num_ids - 1}; train with the tokenizer that made these tokens"
                )
        return ids

    @property
    def num_tokens(self) -> int:
        return sum(pair.num_tokens for pair in self._files)

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([pair.lengths() for pair in self._files])

    def check(self) -> None:
        """Raise ValueError if a file has changed since it was written."""
        if not self._has_sums:
            raise ValueError(
                f"{self._path} has no checksums to compare with; tokenize the text again"
            )
        for pair in self._files:
            pair.check()

    def check_tokenizer(self, tokenizer: BaseTokenizer) -> None:
        """Raise ValueError if the ids were made with another tokenizer.

        If the tokenizer or the integrity of the ids is unknown, warns and checks the range of the ids.
        """
        written_with = self._about["tokenizer"].get("sha256") if self._about else None
        given = tokenizer_hash(tokenizer)
        if None not in (written_with, given):
            if written_with != given:
                raise ValueError(
                    f"{self._path} was written with another tokenizer (hash {written_with}; this job's: "
                    f"{given}); train with the tokenizer of the files, or tokenize the text again"
                )
            if self._has_sums:
                return
            unknown = "are damaged, because an earlier version wrote them, without checksums"
        else:
            lack = "the tokenizer has no hash" if written_with else f"there is no {ABOUT_FILE}"
            unknown = f"were made with this job's tokenizer, because {lack}"
        warn_once(logger, f"{self._path}: it is unknown whether these tokens {unknown}")
        self._num_ids = vocabulary_size(tokenizer)
        for index in range(0, len(self), -(-len(self) // _DOCUMENTS_CHECKED) or 1):
            self[index]

    def _compare_with_about(self, is_folder: bool) -> None:
        listed = {p["name"]: (p["documents"], p["tokens"]) for p in self._about["parts"]}
        opened = {os.path.basename(p.prefix): (len(p), p.num_tokens) for p in self._files}
        names = listed.keys() | opened.keys() if is_folder else opened.keys()
        for name in sorted(names):
            if listed.get(name) != opened.get(name):
                raise ValueError(
                    f"{storage.join(self._folder, ABOUT_FILE)} lists (documents, tokens) of {name} = {listed.get(name)}, and "
                    f"the folder has {opened.get(name)}; copy the whole folder again, or move other files "
                    "out of it"
                )


class Pair:
    """The files `prefix`.bin, .idx and, with `has_sums`, .crc32."""

    def __init__(self, prefix: str, has_sums: bool = False) -> None:
        self.prefix, self._seed, self._sums = prefix, _seed_of(prefix), None
        files = [prefix + ending for ending in (".idx", ".bin", SUMS)[: 2 + has_sums]]
        missing = [file for file in files if not storage.exists(file)]
        if missing:
            lack = f"{' and '.join(missing)}: missing"
            needed = "a pair of .bin and .idx files"
            if missing[:2] == files[:2]:
                lack, needed = f"{prefix}: no pair there", f"a folder with pairs, or {needed},"
            raise ValueError(
                f"{lack} (looked in {os.getcwd()}), and {needed} is needed; write pairs with "
                "`torchtitan tokenize`, or correct the path"
            )
        self._map_index(files[0])
        self._data = _mapped(files[1])
        self.num_tokens = len(self._data) // self._type.itemsize
        ends = self._pointers[-1:] + self._lengths[-1:].astype(np.int64) * self._type.itemsize
        self._check_size(files[1], self._data, int(ends.sum()))
        if has_sums:
            sums = _mapped(files[2], whole=True)
            self._check_size(files[2], sums, 4 * len(self))
            self._sums = np.frombuffer(sums, "<u4")

    def __len__(self) -> int:
        return len(self._documents) - 1

    def _check_size(self, file: str, content: Any, size: int) -> None:
        if len(content) != size:
            raise ValueError(
                f"{file} has {len(content)} bytes, and its index lists {size}: one of the two files was cut "
                f"off, or they are of different pairs; {_AGAIN}"
            )

    def _map_index(self, path: str) -> None:
        index = _mapped(path, whole=True)
        header = index[: _HEADER.size].ljust(_HEADER.size, b"\0")
        magic, version, code, num_sequences, num_starts = _HEADER.unpack(header)
        expected = _HEADER.size + 12 * num_sequences + 8 * num_starts
        problem = None
        if magic != _MAGIC:
            problem = f"begins with {magic!r}, but Megatron-LM's format begins with {_MAGIC!r}"
        elif version != _VERSION or code not in _TYPES:
            problem = (
                f"has version {version} and ids of the type code {code}; known are version {_VERSION} and "
                f"the codes of integers, {', '.join(map(str, _TYPES))}"
            )
        elif len(index) != expected:
            problem = (
                f"has {len(index)} bytes, and {expected} are needed for its {num_sequences} sequences and "
                f"{num_starts - 1} documents (a corpus of images has one more byte per sequence, and is not read)"
            )
        else:
            self._type, at = np.dtype(_TYPES[code]), _HEADER.size
            self._lengths = np.frombuffer(index, "<i4", num_sequences, at)
            self._pointers = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
            self._documents = np.frombuffer(index, "<i8", num_starts, at + 12 * num_sequences)
            bounds = self._documents[[0, -1]].tolist() if num_starts else []
            if bounds != [0, num_sequences]:
                problem = f"lists documents of the sequences {bounds}, not 0 to {num_sequences}"
        if problem:
            raise ValueError(f"{path} {problem}; copy or write the pair again")

    def read(self, number: int) -> np.ndarray:
        """Return a document's ids; ValueError if they, or the index, are damaged."""
        first, last = self._documents[number : number + 2].tolist()
        problem = f"sequences {first} to {last} of {len(self._lengths)}"
        if 0 <= first <= last <= len(self._lengths):
            sequences, size = slice(max(first - 1, 0), last), self._type.itemsize
            begins, lengths = self._pointers[sequences].tolist(), self._lengths[sequences].tolist()
            ends = [begin + size * n for begin, n in zip(begins, lengths, strict=True)]
            if first == 0:
                ends.insert(0, 0)
            else:  # the document begins where the previous sequence ends
                del begins[0]
            start, end = ends[0], ends[-1]
            problem = f"sequences at bytes {begins[:5]} for {start} to {end} of {len(self._data)}"
            if 0 <= start <= end <= len(self._data) and begins == ends[:-1]:
                ids = np.frombuffer(self._data[start:end], self._type)
                if self._sums is None or zlib.crc32(ids, self._seed) == self._sums[number]:
                    return ids
                problem += ", or the ids differ from those that were written"
        raise ValueError(
            f"{self.where(number)}: a file of the pair is damaged, or belongs to another pair: the index lists "
            f"{problem}; {_AGAIN}"
        )

    def check(self) -> None:
        """Raise ValueError if a file differs from the one that `write_pair` wrote."""
        if _mapped(f"{self.prefix}.idx", whole=True)[:] != b"".join(
            _index(self._lengths, self._type)
        ):
            raise ValueError(f"{self.prefix}.idx is damaged; {_AGAIN}")
        for number in range(len(self)):
            self.read(number)

    def lengths(self) -> np.ndarray:
        if (np.diff(self._documents, append=len(self._lengths)) < 0).any():
            raise ValueError(
                f"{self.prefix}.idx is damaged: a document begins before the previous one; {_AGAIN}"
            )
        ends = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        return np.diff(ends[self._documents])

    def where(self, number: int) -> str:
        return f"{self.prefix}.bin, document {number} (counted from 0)"


def _mapped(path: str, whole: bool = False) -> Any:
    """Return a file's bytes, read on access. whole: read all of a file at an address now."""
    if storage.is_address(path):
        return storage.RangedFile(path)[:] if whole else storage.RangedFile(path)
    with open_file(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


def _prefixes_of(path: str) -> list[str]:
    files = [path]
    if storage.is_folder(path):
        files = [storage.join(path, name) for name in storage.names_in(path) if name[0] != "."]
    return sorted({file[:-4] for file in files if file[-4:] in (".bin", ".idx")}) or [path]


def read_about(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the content of a tokens.json, finished or not; None if there is no such file."""
    if not storage.exists(os.fspath(path)):
        return None
    about = read_json_object(path)
    try:
        if about["format"] != ABOUT_FORMAT:
            raise ValueError(f"its format is {about['format']}; this version reads {ABOUT_FORMAT}")
        # The next two lines raise an exception for missing keys and values of a wrong type.
        parts = [(part["name"], part["documents"] + part["tokens"]) for part in about["parts"]]
        hash((about["finished"], about["tokenizer"].get("sha256"), *parts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); copy it again, or tokenize the text "
            "again"
        ) from None
    return about


def tokenizer_hash(tokenizer: BaseTokenizer | None) -> str | None:
    """Return a SHA-256 of the tokenizer and its begin- and end-of-text ids; None if not from `tokenizers`."""
    backend = getattr(tokenizer, "tokenizer", None)
    if not hasattr(backend, "to_str"):
        return None
    ends = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
    return hashlib.sha256(f"{backend.to_str()}\n{ends}".encode()).hexdigest()


def vocabulary_size(tokenizer: BaseTokenizer) -> int:
    """Return the largest id plus 1, which exceeds the number of tokens if some ids are unused."""
    if hasattr(tokenizer, "get_vocab"):
        return max(tokenizer.get_vocab().values(), default=-1) + 1
    return tokenizer.get_vocab_size()


# ---- writing ----


def smallest_type(num_ids: int) -> np.dtype:
    """Return Megatron-LM's integer type for this many ids: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if num_ids < 65_500 else "<i4")


def write_pair(prefix: str, documents: Iterable[Sequence[int]], id_type: np.dtype) -> int:
    """Write `prefix`.bin, .crc32 and .idx, and return the number of ids; a killed writer leaves no .idx."""
    lengths, sums = array("i"), array("I")
    with (  # the files are renamed into place in reverse order, .idx last
        whole_file(f"{prefix}.idx") as index_file,
        whole_file(f"{prefix}{SUMS}") as sums_file,
        whole_file(f"{prefix}.bin") as file,
    ):
        for document in documents:
            ids = np.asarray(document, id_type).tobytes()
            file.write(ids)
            lengths.append(len(document))
            sums.append(zlib.crc32(ids, _seed_of(prefix)))
        sums_file.write(np.array(sums, "<u4").tobytes())
        index_file.writelines(_index(np.array(lengths, "<i4"), id_type))
    return sum(lengths)


def _index(lengths: np.ndarray, id_type: np.dtype) -> Iterator[bytes]:
    """Yield the content of an .idx file for documents of one sequence each. lengths: int32 [D]."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == id_type)
    yield _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1)
    yield lengths.tobytes()
    ends = np.cumsum(lengths, dtype="<i8")
    yield ((ends - lengths) * id_type.itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


def _seed_of(prefix: str) -> int:
    return zlib.crc32(os.path.basename(prefix).encode())
