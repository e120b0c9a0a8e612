r"""Token ids on disk, memory-mapped: pairs of `.bin` and `.idx` files as Megatron-LM writes them.

The `.bin` file holds only the ids, document after document. The `.idx` file, little-endian:

    9 bytes        b"MMIDIDX\0\0"
    uint64         1, the version
    uint8          the code of the ids' type, see `_TYPES`
    uint64         S, the number of sequences
    uint64         D + 1, where D is the number of documents
    int32 [S]      the number of ids of each sequence
    int64 [S]      the byte of the `.bin` file at which each sequence begins
    int64 [D + 1]  the number of each document's first sequence; the last entry is S

A document is usually one sequence. `torchtitan.data.tokenize` adds a file `tokens.json`, which says
with which tokenizer the ids were made, and is marked as finished when all pairs are whole.
"""

import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.local_files import locate
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.files import open_file, read_json_object
from torchtitan.tools.logging import logger, warn_once

ABOUT_FILE = "tokens.json"
ABOUT_FORMAT = 1
UNFINISHED = ".unfinished"  # ends the name of a file that is being written

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floats.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# A foreign corpus is checked at the beginnings of this many documents.
_DOCUMENTS_CHECKED, _IDS_CHECKED = 100, 4096


class TokenDocuments:
    """Documents of token ids by number: `documents[i]` is a read-only array [ids] of the file's type.

    The array is a view of the mapped file, so taking a part of a long document reads only that part.
    Opening takes a time per pair of files, and none per document. When pickled, for example into a
    data worker, the files are mapped again.

    path: a folder of pairs; or a pair's `.bin` file, `.idx` file, or path without these endings.
    Raises ValueError if a file is missing, damaged or unfinished.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        is_folder = os.path.isdir(path)
        folder = Path(path) if is_folder else Path(path).parent
        self._about = read_about(folder / ABOUT_FILE)
        if self._about is not None and self._about["finished"] is not True:
            raise ValueError(
                f"{folder / ABOUT_FILE} says that the folder is unfinished; run the same `python -m "
                "torchtitan.data.tokenize` again, which goes on where it was stopped"
            )
        prefixes = [path.removesuffix(".bin").removesuffix(".idx")]
        self._pairs = [Pair(prefix) for prefix in (_prefixes_in(folder) if is_folder else prefixes)]
        if self._about is not None:
            self._compare_with_about(folder)
        self._ends = list(accumulate(pair.num_documents for pair in self._pairs))

    def __reduce__(self) -> tuple:
        return TokenDocuments, (self._path,)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        pair, number = self._locate(index)
        return pair.read(number)

    @property
    def num_tokens(self) -> int:
        return sum(pair.num_tokens for pair in self._pairs)

    @property
    def lengths(self) -> np.ndarray:
        """The number of ids of each document, int64."""
        return np.concatenate([pair.lengths() for pair in self._pairs])

    def where(self, index: int) -> str:
        pair, number = self._locate(index)
        return pair.where(number)

    def check_tokenizer(self, tokenizer: BaseTokenizer) -> None:
        """Raise ValueError if the ids were made with another tokenizer.

        Without tokens.json that is unknown, which is logged once. Then the beginnings of up to 100
        documents must have ids of the tokenizer's vocabulary.
        """
        written_with = self._about["tokenizer"].get("sha256") if self._about else None
        given = tokenizer_hash(tokenizer)
        if written_with is not None and given is not None:
            if written_with != given:
                raise ValueError(
                    f"{self._path} was written with another tokenizer: {ABOUT_FILE} has the hash "
                    f"{written_with}, and the tokenizer of this job has {given}; train with the "
                    "tokenizer that wrote the folder, or tokenize the text again"
                )
            return
        warn_once(
            logger,
            f"{self._path}: it is unknown whether these tokens were made with this job's tokenizer, "
            f"because {'the tokenizer has no hash' if written_with else f'there is no {ABOUT_FILE}'}",
        )
        size = vocabulary_size(tokenizer)
        for index in range(0, len(self), -(-len(self) // _DOCUMENTS_CHECKED) or 1):
            ids = self[index][:_IDS_CHECKED]
            if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise ValueError(
                    f"{self.where(index)} has the id {wrong}, and the tokenizer's ids are 0 to "
                    f"{size - 1}; train with the tokenizer that made these tokens"
                )

    def _locate(self, index: int) -> tuple["Pair", int]:
        """Return (the pair, the number of the document in it)."""
        pair, number = locate(index, self._ends)
        return self._pairs[pair], number

    def _compare_with_about(self, folder: Path) -> None:
        """Raise ValueError if the opened pairs of `folder` are not those that its tokens.json lists."""
        listed = {part["name"]: part for part in self._about["parts"]}
        opened = {os.path.basename(pair.prefix): pair for pair in self._pairs}
        missing = listed.keys() - opened.keys() if folder == Path(self._path) else set()
        if odd := sorted(missing | (opened.keys() - listed.keys())):
            problem = "is missing" if odd[0] in missing else "is not listed there"
            raise ValueError(
                f"{folder / ABOUT_FILE} lists {len(listed)} parts, and {odd[0]} {problem}; copy the "
                "whole folder again, or move other files out of it"
            )
        for name, pair in opened.items():
            numbers = listed[name]["documents"], listed[name]["tokens"]
            if numbers != (pair.num_documents, pair.num_tokens):
                raise ValueError(
                    f"{pair.prefix}.idx has {pair.num_documents} documents and {pair.num_tokens} "
                    f"tokens, and {ABOUT_FILE} lists {numbers[0]} and {numbers[1]}; copy the whole "
                    "folder again"
                )


class Pair:
    """A `.bin` file and its `.idx` file. prefix: their path without these endings."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        files = [prefix + ".idx", prefix + ".bin"]
        missing = [file for file in files if not os.path.exists(file)]
        if len(missing) == 2:
            raise ValueError(
                f"there are no token files at {prefix!r} (looked in {os.getcwd()}): need a folder "
                "with pairs of .bin and .idx files, or one such pair; correct the path"
            )
        if missing:
            raise ValueError(
                f"{missing[0]} is missing, and its pair cannot be read without it; copy it there, or "
                "remove the other file of the pair"
            )
        self._map_index(files[0])
        with open_file(files[1], "rb") as file:
            self._data, data_size = _map(file)
        last_byte = 0
        if len(self._lengths):
            last_byte = int(self._pointers[-1]) + int(self._lengths[-1]) * self._type.itemsize
        if data_size != last_byte:
            raise ValueError(
                f"{files[1]} has {data_size} bytes, and its index lists {last_byte}: one of the two "
                "files was cut off, or they are of different pairs; copy both again"
            )
        self.num_documents = len(self._documents) - 1
        self.num_tokens = data_size // self._type.itemsize

    def _map_index(self, path: str) -> None:
        with open_file(path, "rb") as file:
            header = file.read(_HEADER.size)
            index, size = _map(file)
        if not header.startswith(_MAGIC):
            raise ValueError(
                f"{path} must begin with {_MAGIC!r}, got {header[: len(_MAGIC)]!r}: it is not an "
                "index of Megatron-LM's memory-mapped format; write the pair in that format"
            )
        version, code, num_sequences, num_starts = _VERSION, next(iter(_TYPES)), 0, 0
        if len(header) == _HEADER.size:
            _, version, code, num_sequences, num_starts = _HEADER.unpack(header)
        if version != _VERSION:
            raise ValueError(
                f"{path} has version {version}, and only version {_VERSION} is known; write the pair "
                "in that version"
            )
        if code not in _TYPES:
            raise ValueError(
                f"{path} has code {code} for the type of its ids, and integers have the codes "
                f"{', '.join(map(str, _TYPES))}; write the pair with one of these"
            )
        expected = _HEADER.size + 12 * num_sequences + 8 * num_starts
        if size != expected:
            is_multimodal = size == expected + num_sequences > expected
            reason = "it was cut off or overwritten; copy it again"
            if is_multimodal:
                reason = "it also has a mode for each sequence; only corpora of text can be read"
            raise ValueError(
                f"{path} has {size} bytes, and {expected} are needed for its {num_sequences} "
                f"sequences and {max(num_starts - 1, 0)} documents: {reason}"
            )
        self._type = np.dtype(_TYPES[code])
        at = _HEADER.size
        self._lengths = np.frombuffer(index, "<i4", num_sequences, at)
        self._pointers = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
        self._documents = np.frombuffer(index, "<i8", num_starts, at + 12 * num_sequences)
        bounds = self._documents[[0, -1]].tolist() if num_starts else []
        if bounds != [0, num_sequences]:
            raise ValueError(
                f"{path}: the documents must begin with sequence 0 and end with {num_sequences}, got "
                f"{bounds}; write the pair again"
            )

    def read(self, number: int) -> np.ndarray:
        first, last = int(self._documents[number]), int(self._documents[number + 1])
        if first == last:
            return np.empty(0, self._type)
        problem = None
        if not 0 <= first < last <= len(self._lengths):
            problem = f"sequences {first} to {last} of {len(self._lengths)}"
        else:
            # The sequences of a document lie one behind the other.
            itemsize = self._type.itemsize
            length = int(self._lengths[first:last].sum(dtype=np.int64))
            start = int(self._pointers[first])
            end = int(self._pointers[last - 1]) + int(self._lengths[last - 1]) * itemsize
            if not 0 <= start <= end <= len(self._data) or end - start != length * itemsize:
                problem = f"{length} ids at bytes {start} to {end} of {len(self._data)}"
        if problem is not None:
            raise ValueError(
                f"{self.where(number)}: the index is damaged, because it lists {problem} for this "
                "document; copy the .idx file again, or write the pair again"
            )
        return np.frombuffer(self._data, self._type, length, start)

    def lengths(self) -> np.ndarray:
        ends = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        return np.diff(ends[self._documents])

    def where(self, number: int) -> str:
        return f"{self.prefix}.bin, document {number} (counted from 0)"


def _map(file: Any) -> tuple[mmap.mmap | bytes, int]:
    """Return (the content of an open file, its number of bytes)."""
    size = os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"", size


def _prefixes_in(folder: Path) -> list[str]:
    """Return the paths, without endings, of the pairs in `folder`, in the order of their names."""
    files = [f for f in folder.iterdir() if f.suffix in (".bin", ".idx") and f.name[0] != "."]
    if not files:
        raise ValueError(
            f"{folder} holds no token files (pairs of .bin and .idx); write some with `python -m "
            "torchtitan.data.tokenize`, or correct the path"
        )
    return sorted({str(file.with_suffix("")) for file in files})


def read_about(path: Path) -> dict[str, Any] | None:
    """Return the content of a tokens.json, finished or not; None if there is no such file."""
    if not path.exists():
        return None
    about = read_json_object(path)
    try:
        if about.get("format") != ABOUT_FORMAT:
            raise ValueError(f"its format is {about.get('format')}, and {ABOUT_FORMAT} is known")
        if missing := {"finished", "tokenizer", "parts"} - about.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        kinds = {"name": str, "documents": int, "tokens": int}
        parts = about["parts"] if isinstance(about["parts"], list) else [None]
        for part in parts:
            if not isinstance(part, dict) or not all(type(part.get(k)) is kinds[k] for k in kinds):
                raise ValueError(
                    f"its parts must be a list of objects with name, documents and tokens, got {part!r}"
                )
        if not isinstance(about["tokenizer"], dict):
            raise ValueError("its tokenizer must be an object")
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; copy it again, or tokenize the text again"
        ) from None
    return about


def tokenizer_hash(tokenizer: BaseTokenizer) -> str | None:
    """Return the SHA-256 of what decides a text's ids; None for a tokenizer of another library.

    It covers the `tokenizers` library's whole JSON, and the ids that begin and end a document.
    """
    backend = getattr(tokenizer, "tokenizer", None)
    if not hasattr(backend, "to_str"):
        return None
    ends = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
    return hashlib.sha256(f"{backend.to_str()}\n{ends}".encode()).hexdigest()


def vocabulary_size(tokenizer: BaseTokenizer) -> int:
    """Return one more than the largest id, which may exceed the number of ids."""
    if hasattr(tokenizer, "get_vocab"):
        return max(tokenizer.get_vocab().values(), default=-1) + 1
    return tokenizer.get_vocab_size()


# ---- writing ----


def smallest_type(num_ids: int) -> np.dtype:
    """Return the type for that many ids, by Megatron-LM's rule: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if num_ids < 65_500 else "<i4")


def write_pair(
    prefix: str, documents: Iterable[Iterable[Sequence[int]]], id_type: np.dtype
) -> None:
    """Write `prefix`.bin and `prefix`.idx; a killed writer leaves no file `prefix`.idx.

    documents: the ids of each document in pieces, which are written as they come.
    """
    files = {ending: f"{prefix}{ending}.{os.getpid()}{UNFINISHED}" for ending in (".bin", ".idx")}
    try:
        lengths = array("i")
        with open_file(files[".bin"], "wb") as file:
            for pieces in documents:
                length = 0
                for piece in pieces:
                    file.write(np.asarray(piece, id_type).tobytes())
                    length += len(piece)
                lengths.append(length)
            sync(file)
        with open_file(files[".idx"], "wb") as file:
            for block in _index(np.array(lengths, "<i4"), id_type):
                file.write(block)
            sync(file)
        for ending, unfinished in files.items():
            os.replace(unfinished, prefix + ending)
    finally:
        for unfinished in files.values():
            with suppress(FileNotFoundError):
                os.unlink(unfinished)


def _index(lengths: np.ndarray, id_type: np.dtype) -> Iterator[bytes]:
    """Yield the content of an index in which each document is one sequence; lengths: int32 [D]."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == id_type)
    yield _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1)
    yield lengths.tobytes()
    ends = np.cumsum(lengths, dtype="<i8")
    yield ((ends - lengths) * id_type.itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


def sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
