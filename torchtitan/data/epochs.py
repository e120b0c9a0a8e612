"""The number of steps of `training.epochs`: a count of all tokens, which is kept for later runs."""

import hashlib
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.document_sources import Source
from torchtitan.data.lanes import Lane, Packing
from torchtitan.data.open_document import Tokens
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.tools.logging import logger

_SECONDS_BETWEEN_REPORTS = 10


def steps_of(epochs: float, sources: list[Source], packing: Packing, num_rows: int) -> int:
    """Return the number of steps in which every lane reads its part of the data `epochs` times.

    num_rows: of the global batch. Collective over all ranks, which count a part of the documents each.
    Raises ValueError for a stream and for a mixture, whose passes are not of equal length.
    """
    if len(sources) > 1 or not sources[0].is_indexed:
        raise ValueError(
            f"training.epochs = {epochs} needs one data set whose documents can be counted: set "
            "training.steps for a stream or for training.mixture (whose tables have `epochs`, too)"
        )
    (source,) = sources
    lengths = _lengths(source)
    seq_len = packing.seq_len
    if packing.method == "concat":
        rows = lengths.sum() * epochs // (seq_len + 1)
    elif packing.method == "none":
        rows = np.ceil(lengths / seq_len).sum() * epochs
    else:
        rows = _num_fitted_rows(lengths, epochs, source, packing, num_rows)
    steps = max(1, math.ceil(rows / num_rows))
    logger.info(
        f"training.epochs = {epochs:g}: {len(lengths):,} documents of {lengths.sum():,} tokens fill "
        f"{int(rows):,} rows of {seq_len}, so training.steps = {steps}"
    )
    return steps


def _num_fitted_rows(
    lengths: NDArray[np.int64], epochs: float, source: Source, packing: Packing, num_rows: int
) -> int:
    """Pack documents of these lengths, without their texts."""

    def blank(length: int) -> Tokens:
        return Tokens(np.broadcast_to(np.int32(0), (length,)))

    blanks = Source(source.name, lengths, blank, source.tokenizer, limit=epochs, seed=source.seed)
    rows = 0
    for number in range(num_rows):
        lane = Lane([blanks], packing, number, num_rows)
        while lane.next_pieces():
            rows += 1
    return rows


def _lengths(source: Source) -> NDArray[np.int64]:
    """Return the number of tokens of every document, from an earlier run if the data are the same."""
    if hasattr(source.data, "lengths"):
        return np.asarray(source.data.lengths, np.int64)
    file = _cache_file(source)
    cached = None
    try:
        cached = np.load(file, allow_pickle=False)
    except (OSError, ValueError):
        pass
    if all(all_ranks(cached is not None and cached.shape == (len(source.data),))):
        return cached
    own = _count_share(source)
    lengths = np.zeros(len(source.data), np.int64)
    for rank, counted in enumerate(shares := all_ranks(own)):
        lengths[rank :: len(shares)] = counted
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb") as opened:
            np.save(opened, lengths)
        unfinished.replace(file)
    except OSError as error:
        logger.warning(f"the count of tokens cannot be kept for later runs in {file}: {error}")
    return lengths


def _count_share(source: Source) -> list[int]:
    """Return the lengths of the documents that this rank counts."""
    ranks = all_ranks(os.getpid())
    numbers = range(ranks.index(os.getpid()), len(source.data), len(ranks))
    lengths: list[int] = []
    reported = time.monotonic()
    for number in numbers:
        document = source.open(source.data[number], number)
        length = 0
        while n := len(document.take(2**16).ids):
            length += n
        lengths.append(length)
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            logger.info(f"counting tokens: {len(lengths):,} of {len(numbers):,} documents")
    return lengths


def _cache_file(source: Source) -> Path:
    """Return a file whose name depends on the data and on the tokenizer."""
    content: list[Any] = [source.name, source.path, len(source.data)]
    if os.path.exists(source.path):
        files = [Path(source.path), *sorted(Path(source.path).rglob("*"))]
        content += [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    backend = getattr(source.tokenizer, "tokenizer", None)
    content.append(backend.to_str() if hasattr(backend, "to_str") else repr(source.tokenizer))
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:24]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "torchtitan", f"document_lengths_{digest}.npy")
