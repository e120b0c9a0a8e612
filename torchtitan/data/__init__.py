"""From files to batches: datasets, tokenizers, loaders. This file defines an entry of the registry."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class DatasetConfig:
    """An entry of `text_datasets.DATASETS`: a default path, and functions that read documents."""

    path: str  # the default of `dataset_path`
    loader: Callable  # path -> samples, as docs/datasets.md describes them
    sample_processor: Callable  # sample -> its text
    # Replaces `sample_processor` for samples that are not texts. (data, tokenizer, Training) -> a
    # function that converts a sample to `open_document.Tokens`
    make_encoder: Callable | None = None
