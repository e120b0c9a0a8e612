"""Turns data files into batches: datasets, tokenizers, dataloaders. This file defines `DatasetConfig`."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class DatasetConfig:
    """An entry of `text_datasets.DATASETS`: a default path, and functions that read documents."""

    path: str  # used if the config sets no `dataset_path`
    loader: Callable  # path -> samples; see docs/datasets.md
    sample_processor: Callable  # sample -> its text
    # Used in place of `sample_processor` if samples are not strings: called with (data, tokenizer, Training),
    # it returns a function that converts a sample to `open_document.Tokens`
    make_encoder: Callable | None = None
