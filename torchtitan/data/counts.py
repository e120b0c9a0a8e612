"""The numbers of tokens of all documents, counted once and kept for later runs.

The steps of `training.epochs` follow from them, and the log of a chat dataset says what is trained.
"""

import hashlib
import math
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.document_sources import Source
from torchtitan.data.lanes import Lane, Packing
from torchtitan.data.local_files import sizes_of
from torchtitan.data.open_document import Tokens
from torchtitan.data.token_files import tokenizer_hash
from torchtitan.distributed.processes.ranks import all_ranks, num_ranks
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import cache_folder
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import _rank

_SECONDS_BETWEEN_REPORTS = 10


def steps_of(epochs: float, sources: list[Source], packing: Packing, num_rows: int) -> int:
    """Return the number of steps in which the lanes read the data `epochs` times.

    num_rows: of the global batch. Collective over all ranks, which count a part of the documents each.
    Raises ConfigError for a stream.
    """
    (source,) = sources  # a config with a mixture has no `training.epochs`
    if not source.is_indexed:
        raise ConfigError(
            f"training.epochs = {epochs} needs documents that can be counted, and dataset "
            f"{source.name!r} is a stream; set training.steps"
        )
    lengths = count_tokens(source)[:, 0]
    seq_len = packing.seq_len
    if packing.method == "concat":
        rows = lengths.sum() * epochs / (seq_len + 1)
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


def count_tokens(source: Source) -> NDArray[np.int64]:
    """Return (tokens, trained tokens, tokens before a cut) of every document, [N, 3].

    Read from a file if an earlier run counted the same data. Collective over all ranks.
    """
    if source.counts is None:
        source.counts = _all_counts(source)
    return source.counts


def _all_counts(source: Source) -> NDArray[np.int64]:
    if hasattr(source.data, "lengths"):
        return np.repeat(np.asarray(source.data.lengths, np.int64)[:, None], 3, axis=1)
    file = _cache_file(source)
    cached = None
    try:
        cached = np.load(file, allow_pickle=False)
    except (OSError, ValueError):
        pass
    if all(all_ranks(cached is not None and cached.shape == (len(source.data), 3))):
        return cached
    counts = np.zeros((len(source.data), 3), np.int64)
    for rank, counted in enumerate(all_ranks(_count(source))):
        counts[rank :: num_ranks()] = counted
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb") as opened:
            np.save(opened, counts)
        unfinished.replace(file)
    except OSError as error:
        logger.warning(f"the counts of tokens cannot be kept for later runs in {file}: {error}")
    return counts


def _count(source: Source) -> NDArray[np.int64]:
    indices = range(_rank(), len(source.data), num_ranks())
    counts = np.zeros((len(indices), 3), np.int64)
    reported = time.monotonic()
    for i, index in enumerate(indices):
        sample = source.data[index]
        if hasattr(source.encode, "count"):
            counts[i] = source.checked(source.encode.count, sample, index)
        else:
            document = source.open(sample, index)
            while n := len(document.take(2**16).ids):
                counts[i] += n
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            logger.info(f"counting tokens: {i + 1:,} of {len(indices):,} documents of this rank")
    return counts


def _cache_file(source: Source) -> Path:
    """Return a file whose name depends on the data, the tokenizer and the encoder."""
    made_with = tokenizer_hash(source.tokenizer) or repr(source.tokenizer)
    content = [source.name, source.path, len(source.data), sizes_of(source.path), made_with]
    content.append(getattr(source.encode, "key", None))
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:24]
    return cache_folder() / f"token_counts_{digest}.npy"
