"""From files to batches: text datasets, tokenizers, loaders. Here: a dataset's entry."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class DatasetConfig:
    """How to get the documents of one dataset."""

    path: str  # where the data are unless the config gives another path
    loader: Callable  # path -> samples; docs/datasets.md says what they may be
    sample_processor: Callable  # sample -> its text
