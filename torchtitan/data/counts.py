"""The numbers of tokens of all documents, counted once and kept for later runs."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.document_sources import Source
from torchtitan.data.local_files import record_of
from torchtitan.data.open_document import PIECE_CHARACTERS
from torchtitan.data.token_files import tokenizer_hash
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.processes.ranks import all_ranks, num_ranks, on_all_ranks
from torchtitan.tools.files import cache_folder, open_file, whole_file
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import _rank

_SECONDS_BETWEEN_REPORTS = 10
_TEXTS_AT_ONCE = 64  # 1,024 take a fifth more CPU time


def count_tokens(source: Source) -> NDArray[np.int64]:
    """Return (tokens, trained tokens, tokens before a cut) of every document, [N, 3].

    Collective over all ranks.
    """
    if source.counts is None:
        source.counts = _all_counts(source)
    return source.counts


def _all_counts(source: Source) -> NDArray[np.int64]:
    if hasattr(source.data, "lengths"):
        return np.repeat(np.asarray(source.data.lengths, np.int64)[:, None], 3, axis=1)
    made_with = tokenizer_hash(source.tokenizer) or repr(source.tokenizer)
    key = [source.name, source.path, len(source.data), record_of(source.path), made_with]
    key.append(getattr(source.encode, "key", None))
    key.append(getattr(source.tokenizer, "begins_documents", None))
    cached = _read(key)
    if all(all_ranks(cached is not None and cached.shape == (len(source.data), 3))):
        return cached
    counts = np.zeros((len(source.data), 3), np.int64)
    for rank, counted in enumerate(on_all_ranks(lambda: _count(source))):
        counts[rank :: num_ranks()] = counted
    return kept(key, lambda: counts, again=True)


def _count(source: Source) -> NDArray[np.int64]:
    indices = range(_rank(), len(source.data), num_ranks())
    counts = np.zeros((len(indices), 3), np.int64)
    own = source.tokenizer
    backend = own.tokenizer if type(own) is HuggingFaceTokenizer else None
    texts: dict[int, str] = {}  # short ones, which are encoded together, on all processors
    if backend is not None:  # tokens that begin or end a document
        num_ends = len(own.encode("", add_bos=own.begins_documents, add_eos=True))
        num_ends -= len(backend.encode("").ids)
    reported = time.monotonic()
    for i, index in enumerate(indices):
        sample = source.data[index]
        if hasattr(source.encode, "count"):
            counts[i] = source.checked(source.encode.count, sample, index)
        else:
            document = source.open(sample, index)
            if backend is not None and 0 < len(document.text) <= PIECE_CHARACTERS:
                texts[i] = document.text
            while i not in texts and (n := len(document.take(2**16).ids)):
                counts[i] += n
        if len(texts) == _TEXTS_AT_ONCE or (texts and i + 1 == len(indices)):
            encodings = backend.encode_batch_fast(list(texts.values()))
            lengths = np.array([len(encoding.ids) for encoding in encodings])
            counts[list(texts)] = lengths[:, None] + num_ends
            texts = {}
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            logger.info(f"counting tokens: {i + 1:,} of {len(indices):,} documents of this rank")
    return counts


# ---- numbers that are kept for later runs ----


def kept(key: object, make: Callable[[], NDArray[Any]], again: bool = False) -> NDArray[Any]:
    """Return `make()`, from a file if an earlier run kept it. again: make it in any case."""
    if not again and (numbers := _read(key)) is not None:
        return numbers
    numbers, path = make(), _file_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(file, numbers)
    except OSError as error:
        logger.warning(f"the counts of tokens cannot be kept for later runs in {path}: {error}")
    return numbers


def _read(key: object) -> NDArray[Any] | None:
    path = _file_of(key)
    try:
        with open_file(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            return content["arr_0"]
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy and zipfile raise many types
        logger.warning(f"the counts of tokens in {path} are damaged, and made again: {error}")
    return None


def _file_of(key: object) -> Path:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return cache_folder() / f"counts_{digest}.npz"
