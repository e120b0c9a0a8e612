"""Readers for Hugging Face files with quantized weights; they return dequantized fp32 weights."""

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
    """Return a reader for fp8 with one scale per block (DeepSeek-V3), or for MXFP4 (gpt-oss)."""
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
    """Finds weights and scales through the files' headers; torch 2.13's reader needs an index file."""

    def _load_quantization_metadata(self) -> None:
        metadata = HuggingFaceStorageReader.read_metadata(self)
        files = {
            index.fqn: os.path.basename(entry.relative_path)
            for index, entry in metadata.storage_data.items()
        }
        torch_parts.map_scales(self, files)


class MXFP4Reader(QuantizedReader):
    """Reads experts as [E, out, in].

    torch 2.13's reader gives the single chunk of a dequantized tensor the stored shape [E, out,
    groups, 16], so DCP would read only the first `groups` columns. This class corrects the shape.
    """

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            if name.endswith("_blocks"):
                # Keep the offsets: DCP finds the chunk in the files by its offsets.
                (part,) = tensor.chunks
                tensor.chunks = [ChunkStorageMetadata(part.offsets, tensor.size)]
        return metadata
