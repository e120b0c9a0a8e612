"""The reference's path of `torchtitan.data.text_datasets`."""
# ruff: noqa: F401

from torchtitan.data.text_datasets import (
    DATASETS,
    MAX_EMPTY_DOCUMENTS_IN_A_ROW,
    HuggingFaceTextDataset,
    build_text_dataloader,
    build_text_validation_dataloader,
)
