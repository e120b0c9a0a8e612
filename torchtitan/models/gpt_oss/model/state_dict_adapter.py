"""gpt-oss weights under the names of Hugging Face's GptOssForCausalLM."""

from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.hf_adapter import Fused, KeyMapAdapter, block_hf_key_map, dense_hf_key_map

_EXPERTS = {"gate_up_proj": "mlp1", "down_proj": "mlp2"}


class GptOssStateDictAdapter(KeyMapAdapter):
    """Writes unquantized files, which transformers loads; reads unquantized and MXFP4 files.

    Experts' weights are [E, in, out] in unquantized files, and [E, out, in], as in our model, when
    dequantized from MXFP4.
    """

    model_args: GptOssModelArgs
    quantized_format = "mxfp4"

    def __init__(self, model_args: GptOssModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = dense_hf_key_map([f"self_attn.{name}_proj" for name in "qkvo"])
        self.from_hf_map["model.layers.{}.self_attn.sinks"] = "layers.{}.attention.sinks"
        for kind in ("weight", "bias"):
            self.from_hf_map |= block_hf_key_map({"mlp.router": "moe.router.gate"}, kind)
        for hf_name, name in _EXPERTS.items():
            hf, ours = f"model.layers.{{}}.mlp.experts.{hf_name}", f"layers.{{}}.moe.experts.{name}"
            self.from_hf_map |= {
                hf: Fused((f"{ours}_weight",), transposed=True),
                f"{hf}_blocks": f"{ours}_weight",
                f"{hf}_scales": None,  # the reader has multiplied by them
                f"{hf}_bias": f"{ours}_bias",
            }
