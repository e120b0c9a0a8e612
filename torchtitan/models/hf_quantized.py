"""Readers of Hugging Face files with quantized weights; they return dequantized fp32 weights."""

from typing import Literal

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader


def build_quantized_reader(
    path: str, number_format: Literal["fp8", "mxfp4"]
) -> HuggingFaceStorageReader:
    """Return a reader of DeepSeek-V3's fp8 in blocks of 128 x 128, or of gpt-oss' MXFP4 experts."""
    if number_format == "mxfp4":
        return MXFP4Reader(path, thread_count=4)
    return QuantizedHuggingFaceStorageReader(
        path, target_dtype=torch.float32, block_size=128, thread_count=4
    )


class MXFP4Reader(QuantizedHuggingFaceStorageReader):
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
