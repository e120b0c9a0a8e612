"""From files to batches: text datasets, tokenizers, loaders. Here: a dataset's entry."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["DatasetConfig"]


@dataclass
class DatasetConfig:
    """How to get the documents of one dataset.

    path: where the data are unless the config gives another path.
    loader: `loader(path)` returns the samples; docs/datasets.md says what they may be.
    sample_processor: `sample_processor(sample)` returns the sample's text.
    """

    path: str
    loader: Callable
    sample_processor: Callable
