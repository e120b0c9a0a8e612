"""Readers of Hugging Face files with quantized weights; they return dequantized fp32 weights."""

import os
from typing import Literal

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from torchtitan.tools import torch_parts
from torchtitan.tools.files import read_json_object


def build_quantized_reader(
    path: str, number_format: Literal["fp8", "mxfp4"]
) -> HuggingFaceStorageReader:
    """Return a reader of fp8 with a scale for each block, as DeepSeek-V3's, or of gpt-oss' MXFP4."""
    file = os.path.join(path, "config.json")
    config = read_json_object(file) if os.path.isfile(file) else {}
    blocks = (config.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
    if len(blocks) != 2 or blocks[0] != blocks[1]:
        raise ValueError(
            f"{file} has weight_block_size = {blocks}, and only square blocks can be read"
        )
    reader = MXFP4Reader if number_format == "mxfp4" else QuantizedReader
    return reader(path, target_dtype=torch.float32, block_size=blocks[0], thread_count=4)


class QuantizedReader(QuantizedHuggingFaceStorageReader):
    """Finds weights and their scales in the files' headers; torch 2.13's reader needs an index."""

    def _load_quantization_metadata(self) -> None:
        metadata = HuggingFaceStorageReader.read_metadata(self)
        files = {
            index.fqn: os.path.basename(entry.relative_path)
            for index, entry in metadata.storage_data.items()
        }
        torch_parts.map_scales(self, files)


class MXFP4Reader(QuantizedReader):
    """Reads experts as [E, out, in].

    torch 2.13's reader gives the one chunk of a dequantized tensor the stored shape [E, out, groups,
    16], so that only the first `groups` columns would be read. Here it gets the tensor's size.
    """

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            if name.endswith("_blocks"):
                # Keep the offsets, by which the chunk is found in the files.
                (part,) = tensor.chunks
                tensor.chunks = [ChunkStorageMetadata(part.offsets, tensor.size)]
        return metadata
