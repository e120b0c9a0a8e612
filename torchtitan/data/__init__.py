"""From files to batches: text datasets, tokenizers, loaders. This file defines a dataset's entry."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class DatasetConfig:
    """A dataset's default path, and the functions that read its documents."""

    path: str  # the default of `dataset_path`
    loader: Callable  # path -> samples, as docs/datasets.md describes them
    sample_processor: Callable  # sample -> its text
    # (data, tokenizer, [training]) -> a function that makes a sample `open_document.Tokens`, in place
    # of `sample_processor`; for samples that are not texts
    make_encoder: Callable | None = None
