"""Llama 4 weights under the names and layouts of Hugging Face."""

from torchtitan.models.hf_adapter import HF_LINEARS, Fused, KeyMapAdapter, dense_hf_key_map
from torchtitan.models.llama4.model.args import TransformerModelArgs

_MULTIMODAL = "language_model."


class Llama4StateDictAdapter(KeyMapAdapter):
    """Renames, and joins w1 and w3 of all experts; RoPE's pairs are neighbours on both sides.

    Names of Llama4ForCausalLM are read and written. So are those of the multimodal
    Llama4ForConditionalGeneration, which has `language_model.` before them: read wherever they
    stand, written where the index file under `hf_assets_path` has them. What belongs to images
    is left out.
    """

    model_args: TransformerModelArgs
    ignored_hf_keys = (r"vision_model\.", r"multi_modal_projector\.")

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        text = _text_hf_key_map()
        multimodal = {_MULTIMODAL + hf: entry for hf, entry in text.items()}
        index = self.fqn_to_index_mapping or {}
        is_multimodal = any(name.startswith(_MULTIMODAL) for name in index)
        # Of several names for one of ours the first is written.
        self.from_hf_map = multimodal | text if is_multimodal else text | multimodal


def _text_hf_key_map() -> dict[str, str | Fused | None]:
    table = {
        hf.replace(".mlp.", ".feed_forward."): ours
        for hf, ours in dense_hf_key_map(biased=HF_LINEARS).items()
    }
    hf_moe, moe = "model.layers.{}.feed_forward", "layers.{}.moe"
    for hf, ours in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        table[f"{hf_moe}.shared_expert.{hf}_proj.weight"] = f"{moe}.shared_experts.{ours}.weight"
    return table | {
        f"{hf_moe}.router.weight": f"{moe}.router.gate.weight",
        f"{hf_moe}.experts.gate_up_proj": Fused(
            (f"{moe}.experts.w1", f"{moe}.experts.w3"), transposed=True
        ),
        f"{hf_moe}.experts.down_proj": Fused((f"{moe}.experts.w2",), transposed=True),
    }
