"""gpt-oss weights under the names of Hugging Face's GptOssForCausalLM."""

from typing import TYPE_CHECKING

from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.hf_adapter import Fused, KeyMapAdapter, dense_hf_key_map

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

_EXPERTS = {"gate_up_proj": "mlp1", "down_proj": "mlp2"}


class GptOssStateDictAdapter(KeyMapAdapter):
    """Writes the unquantized files that transformers loads; reads these and the MXFP4 ones.

    The former have experts' weights [E, in, out], the latter, dequantized, [E, out, in] as we do.
    """

    model_args: GptOssModelArgs

    def __init__(self, model_args: GptOssModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        layer, ours = "model.layers.{}.", "layers.{}."
        self.from_hf_map = dense_hf_key_map([f"self_attn.{name}_proj" for name in "qkvo"])
        self.from_hf_map[layer + "self_attn.sinks"] = ours + "attention.sinks"
        for kind in ("weight", "bias"):
            self.from_hf_map[f"{layer}mlp.router.{kind}"] = f"{ours}moe.router.gate.{kind}"
        for hf_name, name in _EXPERTS.items():
            hf, weight = f"{layer}mlp.experts.{hf_name}", f"{ours}moe.experts.{name}_weight"
            self.from_hf_map |= {
                hf: Fused((weight,), transposed=True),
                f"{hf}_blocks": weight,
                f"{hf}_scales": None,  # the reader has multiplied by them
                f"{hf}_bias": f"{ours}moe.experts.{name}_bias",
            }

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> "HuggingFaceStorageReader":
        if not from_quantized:
            return super().get_hf_storage_reader(path)
        return _build_mxfp4_reader(path)


def _build_mxfp4_reader(path: str) -> "HuggingFaceStorageReader":
    """torch's own, whose metadata says that a dequantized tensor is made of one whole part.

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
