"""Llama 4 weights under the names and layouts of Hugging Face."""

import copy

from torchtitan.models.hf_adapter import (
    HF_LINEARS,
    Fused,
    HFKeyMap,
    KeyMapAdapter,
    dense_hf_key_map,
)
from torchtitan.models.llama4.model.args import TransformerModelArgs

_TEXT_MODEL = "language_model."  # in front of names in multimodal files


class Llama4StateDictAdapter(KeyMapAdapter):
    """Renames, and joins w1 and w3 of all experts; RoPE pairs are neighbours here and in HF.

    Reads the names of Llama4ForCausalLM and of the multimodal Llama4ForConditionalGeneration,
    which begin with `language_model.`. Writes the multimodal names if the index file under
    `hf_assets_path` has them, in an export only if it has the weights for images, too. Those are
    left out on reading.
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
        self._text = text
        index = self.fqn_to_index_mapping or {}
        self._prefer(any(name.startswith(_TEXT_MODEL) for name in index))

    def _prefer(self, multimodal_names: bool) -> None:
        multimodal = {_TEXT_MODEL + hf: entry for hf, entry in self._text.items()}
        # If several names stand for one of our tensors, the first is written.
        self.from_hf_map = multimodal | self._text if multimodal_names else self._text | multimodal

    def for_export(self, has_untrained_parts: bool) -> "Llama4StateDictAdapter":
        adapter = copy.copy(self)
        adapter._prefer(has_untrained_parts)
        index = self.fqn_to_index_mapping or {}
        more = {name.removeprefix(_TEXT_MODEL): number for name, number in index.items()}
        adapter.fqn_to_index_mapping = index | more or None
        return adapter
