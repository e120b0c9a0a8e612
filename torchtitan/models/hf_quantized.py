"""Readers of Hugging Face files with quantized weights, which give them dequantized."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader


def build_fp8_reader(path: str) -> "HuggingFaceStorageReader":
    """Return a reader of DeepSeek-V3's fp8 blocks of 128 x 128 and their scales, as fp32."""
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader,
    )

    return QuantizedHuggingFaceStorageReader(
        path, target_dtype=torch.float32, block_size=128, thread_count=4
    )


def build_mxfp4_reader(path: str) -> "HuggingFaceStorageReader":
    """Return a reader of gpt-oss' MXFP4 experts, as fp32 [E, out, in].

    It is torch's own, whose metadata says that a dequantized tensor is made of one whole part.
    torch corrects the tensor's size, yet leaves the part at [E, out, groups, 16]. Taken as three
    dimensions, that covers the first `groups` columns, and the others would not be read.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader,
    )

    class MXFP4Reader(QuantizedHuggingFaceStorageReader):
        def read_metadata(self) -> Metadata:
            metadata = super().read_metadata()
            for name, tensor in metadata.state_dict_metadata.items():
                if name.endswith("_blocks"):
                    # The offsets stay: they are the part's key in the files.
                    (part,) = tensor.chunks
                    tensor.chunks = [ChunkStorageMetadata(part.offsets, tensor.size)]
            return metadata

    return MXFP4Reader(path, thread_count=4)
