"""Readers of Hugging Face files with quantized weights; they return dequantized fp32 weights."""

import os
from typing import Literal

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

BLOCK_SIZE = 128


def build_quantized_reader(
    path: str, number_format: Literal["fp8", "mxfp4"]
) -> HuggingFaceStorageReader:
    """Return a reader of DeepSeek-V3's fp8 in blocks of 128 x 128, or of gpt-oss' MXFP4 experts."""
    reader = MXFP4Reader if number_format == "mxfp4" else QuantizedReader
    return reader(path, target_dtype=torch.float32, block_size=BLOCK_SIZE, thread_count=4)


class QuantizedReader(QuantizedHuggingFaceStorageReader):
    """Finds weights and their scales in the files' headers; torch 2.13's reader needs an index."""

    def _load_quantization_metadata(self) -> None:
        metadata = HuggingFaceStorageReader.read_metadata(self)
        self._build_weight_scale_mapping(
            {
                index.fqn: os.path.basename(entry.relative_path)
                for index, entry in metadata.storage_data.items()
            }
        )


class MXFP4Reader(QuantizedReader):
    """Reads experts as [E, out, in].

    torch 2.13's reader gives a dequantized tensor the right size, but gives its one chunk the stored
    shape [E, out, groups, 16]. As three dimensions that covers only the first `groups` columns, and
    the remaining columns would not be read. So the chunk gets the tensor's size here.
    """

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            if name.endswith("_blocks"):
                # Keep the offsets, by which the chunk is found in the files.
                (part,) = tensor.chunks
                tensor.chunks = [ChunkStorageMetadata(part.offsets, tensor.size)]
        return metadata
