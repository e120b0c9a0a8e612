"""Llama 4 weights under the names and layouts of Hugging Face."""

from torchtitan.models.hf_adapter import (
    HF_LINEARS,
    Fused,
    HFKeyMap,
    KeyMapAdapter,
    dense_hf_key_map,
)
from torchtitan.models.llama4.model.args import TransformerModelArgs


class Llama4StateDictAdapter(KeyMapAdapter):
    """Renames, and joins w1 and w3 of all experts; RoPE pairs are neighbours here and in HF.

    Reads the names of Llama4ForCausalLM and of the multimodal Llama4ForConditionalGeneration,
    which begin with `language_model.`. Writes the multimodal names if the index file under
    `hf_assets_path` has them. Weights for images are left out.
    """

    model_args: TransformerModelArgs
    ignored_hf_keys = (r"vision_model\.", r"multi_modal_projector\.")

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        text: HFKeyMap = {
            hf.replace(".mlp.", ".feed_forward."): ours
            for hf, ours in dense_hf_key_map(biased=HF_LINEARS).items()
        }
        hf_moe, moe = "model.layers.{}.feed_forward", "layers.{}.moe"
        for hf, ours in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            text[f"{hf_moe}.shared_expert.{hf}_proj.weight"] = f"{moe}.shared_experts.{ours}.weight"
        gate_up = f"{moe}.experts.w1", f"{moe}.experts.w3"
        text |= {
            f"{hf_moe}.router.weight": f"{moe}.router.gate.weight",
            f"{hf_moe}.experts.gate_up_proj": Fused(gate_up, transposed=True),
            f"{hf_moe}.experts.down_proj": Fused((f"{moe}.experts.w2",), transposed=True),
        }
        multimodal = {f"language_model.{hf}": entry for hf, entry in text.items()}
        index = self.fqn_to_index_mapping or {}
        is_multimodal = any(name.startswith("language_model.") for name in index)
        # If several names stand for one of our tensors, the first is written.
        self.from_hf_map = multimodal | text if is_multimodal else text | multimodal
