"""Documents in files of this machine, by number.

JSON lines and plain text are read in place. Opening a JSON-lines file takes one pass, which notes
where its lines begin. Any document is then one seek away, so a run resumes at once from any position.
Parquet and compressed JSON go through the `datasets` library and its memory-mapped cache.
"""

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchtitan.tools.files import open_file

# A longer text file becomes several documents of about this size.
TEXT_DOCUMENT_BYTES = 64 * 1024


_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 5  # of a file's content in a record of it


class SampleRule(NamedTuple):
    """The samples that files of JSON must hold, checked when they are read."""

    example: str  # a sample as JSON
    problem_of: Callable[
        [Any], str | None
    ]  # sample -> the end of an error's sentence; None if it is good


def _problem_of_text(sample: Any) -> str | None:
    if isinstance(sample, dict) and isinstance(sample.get("text"), str):
        return None
    if not isinstance(sample, dict):
        got = type(sample).__name__
    elif "text" in sample:
        got = f"{'null' if sample['text'] is None else type(sample['text']).__name__} there"
    else:
        got = f"the keys {sorted(sample)}"
    return f"need an object with a string under 'text', got {got}"


TEXT = SampleRule('{"text": "..."}', _problem_of_text)


def locate(index: int, ends: list[int]) -> tuple[int, int]:
    """Return (number of the file, number of the document in it). ends: documents through each file."""
    file = bisect_right(ends, index)
    if index < 0 or file == len(ends):
        raise IndexError(index)
    return file, index - (ends[file - 1] if file else 0)


class _FilesOfDocuments:
    """Documents of several files by number. A subclass counts a file's documents, and reads one."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._stats = [path.stat() for path in paths]
        self._ends = list(accumulate(map(self._count, paths)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _open(self, file_index: int) -> BinaryIO:
        """Open a file; raises ValueError if it has changed since the start."""
        path, before = self._paths[file_index], self._stats[file_index]
        try:
            file = open_file(path, "rb")
        except FileNotFoundError:
            now = "has vanished"
        else:
            stat = os.fstat(file.fileno())
            if (stat.st_size, stat.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
                return file
            file.close()
            now = f"has {stat.st_size:,} now, and was written to since"
        raise ValueError(
            f"{path} had {before.st_size:,} bytes when the job started, and {now}; do not change data "
            "while a job reads them"
        )


class JsonLinesDocuments(_FilesOfDocuments):
    """Documents of JSON-lines files: one object per line that follows the rule.

    Blank lines are skipped. Any other line raises ValueError, with file and line number, when its
    document is read.
    """

    def __init__(self, paths: list[Path], rule: SampleRule = TEXT) -> None:
        self._rule = rule
        self._line_starts: list[array[int]] = []
        super().__init__(paths)

    def _count(self, path: Path) -> int:
        starts = array("Q")  # byte offsets of the lines that are not blank
        position = 0
        with open_file(path, "rb") as file:
            for line in file:
                if not line.isspace():
                    starts.append(position)
                position += len(line)
        self._line_starts.append(starts)
        return len(starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file_index, line_index = locate(index, self._ends)
        with self._open(file_index) as file:
            file.seek(self._line_starts[file_index][line_index])
            line = file.readline()
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or deep nesting
            raise ValueError(
                f"{self.where(index)}: not valid JSON ({error}); every line must be one object like "
                f"{self._rule.example}"
            ) from None
        return _checked(sample, self._rule, lambda: self.where(index))

    def where(self, index: int) -> str:
        """Return the document's name for messages; reads the file up to the document."""
        file_index, line_index = locate(index, self._ends)
        start, number = self._line_starts[file_index][line_index], 1
        with open_file(self._paths[file_index], "rb") as file:
            while file.tell() < start:
                file.readline()
                number += 1
        return f"{self._paths[file_index]}, line {number}"


class TextDocuments(_FilesOfDocuments):
    """Documents of plain text files in UTF-8: a short file is one document.

    A file over `TEXT_DOCUMENT_BYTES` is cut at the first line end after each multiple of that
    size. The cuts are found when a document is read, so opening a file of any size is quick.
    """

    def _count(self, path: Path) -> int:
        return -(-path.stat().st_size // TEXT_DOCUMENT_BYTES)

    def __getitem__(self, index: int) -> dict[str, str]:
        file_index, part = locate(index, self._ends)
        with self._open(file_index) as file:
            start, end = _cut(file, part), _cut(file, part + 1)
            file.seek(start)
            content = file.read(end - start)
        try:
            return {"text": content.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.where(index)} is not UTF-8 text: {error.reason} at byte "
                f"{start + error.start}; convert the file to UTF-8"
            ) from error

    def where(self, index: int) -> str:
        return str(self._paths[locate(index, self._ends)[0]])


class _Samples:
    """Samples with `len()` and `[i]` that follow a rule. where: of all of them, for messages.

    has_all_keys: of a `datasets.Dataset`, where a row has None for each key that only other rows have.
    """

    def __init__(self, samples: Any, rule: SampleRule, where: str, has_all_keys: bool) -> None:
        self._samples, self._rule, self._where = samples, rule, where
        self._has_all_keys = has_all_keys

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._samples[index]
        if self._has_all_keys:
            sample = _without_none(sample)
        return _checked(sample, self._rule, lambda: self.where(index))

    def where(self, index: int) -> str:
        return f"{self._where} {index + 1}"


def load_local_documents(path: str, rule: SampleRule = TEXT) -> Any:
    """Return the documents, with `len()` and `[i]`, of a file or of all files in and below a folder.

    rule: for samples of JSON and Parquet. With another rule than `TEXT`, plain text is refused, and the
        documents have a `where(i)`, their names for messages.
    Raises FileNotFoundError if `path` does not exist, ValueError if it holds no data files, files of
    several kinds, or files of an unknown kind.
    """
    known = [kind for kind in _OPENERS if kind != "text" or rule is TEXT]
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(
            f"training.dataset_path (or the dataset's own path): there is no file or folder "
            f"{path!r} (looked in {os.getcwd()}); correct the path, or run from the folder that it "
            f"is relative to"
        )
    paths = _files_in(root)
    if root.is_dir():
        paths = sorted(file for file in paths if _kind_of(file))
        if len({_kind_of(file) for file in paths}) > 1:
            # A dataset from the hub has a card beside its files.
            paths = [file for file in paths if file.name != "README.md"]
    kinds = {_kind_of(file) for file in paths}
    if len(kinds) != 1 or not kinds <= {*known}:
        found = ", ".join(sorted(str(kind) for kind in kinds if kind)) or "no such file"
        raise ValueError(
            f"training.dataset_path must be a data file or a folder with files of one kind "
            f"({', '.join(known)}), got {path!r} with {found}"
        )
    kind = kinds.pop()
    if kind == "JSON lines":
        return _open_json(paths, rule)
    documents = _OPENERS[kind](paths)
    return documents if rule is TEXT else _Samples(documents, rule, f"{path}, row", True)


def _open_json(paths: list[Path], rule: SampleRule) -> JsonLinesDocuments | _Samples:
    path = paths[0]
    with open_file(path, "rb") as file:
        is_list = len(paths) == 1 and file.read(1024).lstrip()[:1] == b"["
    if not is_list:
        return JsonLinesDocuments(paths, rule)
    try:
        return _Samples(json.loads(path.read_bytes()), rule, f"{path}, entry", False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def load_with_datasets(problem: str, remedy: str, *arguments: Any, **options: Any) -> Any:
    """Return `datasets.load_dataset(...)`; its errors become ValueErrors.

    problem, remedy: the beginning and the end of such an error's message.
    """
    from datasets import load_dataset  # slow, and most local files are read without it

    try:
        return load_dataset(*arguments, **options)
    except Exception as error:
        while error.__cause__ is not None:  # the outer errors give no reason
            error = error.__cause__
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{problem}: {reason}; {remedy}") from None


def _open_with_datasets(builder: str, kind: str, paths: list[Path]) -> Any:
    others = f", or one of {len(paths) - 1} files beside it," if len(paths) > 1 else ""
    problem = f"{paths[0]}{others} cannot be read as {kind}"
    files = [str(path) for path in paths]
    remedy = "fetch or write the file again"
    return load_with_datasets(problem, remedy, builder, data_files=files, split="train")


# Kind of file -> how to open all files of that kind.
_OPENERS: dict[str, Callable[[list[Path]], Any]] = {
    "JSON lines": partial(_open_json, rule=TEXT),
    "text": TextDocuments,
    "parquet": partial(_open_with_datasets, "parquet", "Parquet"),
    "compressed JSON lines": partial(_open_with_datasets, "json", "compressed JSON lines"),
}
_KINDS = dict.fromkeys([".jsonl", ".json"], "JSON lines") | dict.fromkeys([".txt", ".md"], "text")
_KINDS[".parquet"] = "parquet"


def _kind_of(path: Path) -> str | None:
    """Return the kind of a file, a key of _OPENERS, by the end of its name; None if unknown."""
    is_compressed = path.suffix in (".gz", ".zst", ".bz2", ".xz")
    if is_compressed and Path(path.stem).suffix in (".jsonl", ".json"):
        return "compressed JSON lines"
    return _KINDS.get(path.suffix)


def _without_none(value: Any) -> Any:
    """Return a value without the keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _checked(sample: Any, rule: SampleRule, where: Callable[[], str]) -> dict[str, Any]:
    if problem := rule.problem_of(sample):
        raise ValueError(f"{where()}: {problem}")
    return sample


def _cut(file: Any, part: int) -> int:
    """Return the byte offset at which part number `part` of a text file begins.

    That is behind the first line end from the nominal offset on; if there is none within a part's
    length, the first offset that does not split a UTF-8 character.
    """
    nominal = part * TEXT_DOCUMENT_BYTES
    if part == 0:
        return 0
    file.seek(nominal - 1)
    window = file.read(TEXT_DOCUMENT_BYTES)
    line_end = window.find(b"\n")
    if line_end >= 0:
        return nominal + line_end
    if len(window) < TEXT_DOCUMENT_BYTES:  # the last line of the file
        return nominal - 1 + len(window)
    shift = 1
    while shift < 4 and window[shift] & 0b1100_0000 == 0b1000_0000:  # continuation bytes
        shift += 1
    return nominal - 1 + shift


def _files_in(root: Path) -> list[Path]:
    """Return a file itself, or the files in and below a folder.

    Names with a dot are left by programs: caches, an editor's copies, the ._ files of a Mac.
    """
    if not root.is_dir():
        return [root]
    return [
        file
        for file in root.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(root).parts)
    ]


def record_of(path: str, is_movable: bool = False) -> dict[str, Any]:
    """Return what shows that files were changed, renamed or replaced; {} if there are none.

    Names, sizes, times and samples of the content of all files are in the digest. is_movable: leave
    out times, so that copies have the same digest, and take samples of at most 128 files.
    """
    root = Path(path)
    if not path or not root.exists():
        return {}
    files = sorted(_files_in(root))
    stats = [file.stat() for file in files]
    digest = hashlib.sha256()
    every = -(-len(files) // 128) if is_movable else 1
    for number, (file, stat) in enumerate(zip(files, stats, strict=True)):
        time = None if is_movable else stat.st_mtime_ns
        digest.update(repr((os.fsencode(file.relative_to(root)), stat.st_size, time)).encode())
        if number % every == 0:
            digest.update(_samples_of(file, stat.st_size))
    return {
        "files": len(stats),
        "bytes": sum(stat.st_size for stat in stats),
        "sha256": digest.hexdigest(),
    }


def _samples_of(path: Path, size: int) -> bytes:
    """Return bytes of the file's head, tail and places in between; a short file's whole content."""
    if not os.access(path, os.R_OK):  # beside the data
        return b""
    with open_file(path, "rb") as file:
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            return file.read()
        samples = []
        for i in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            samples.append(file.read(_SAMPLE_BYTES))
        return b"".join(samples)
