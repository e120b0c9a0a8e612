"""DeepSeek weights under the names of Hugging Face's DeepseekV3ForCausalLM and V2's."""

from collections.abc import Collection
from typing import Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.hf_adapter import (
    HF_EXPERTS,
    KeyMapAdapter,
    block_hf_key_map,
    dense_hf_key_map,
)
from torchtitan.protocols.state_dict_adapter import to_template

_LATENT_QUERIES = {
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
}
_LATENTS_AND_SHARED_EXPERTS = {
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
}
_MTP_PROJECTION = "model.layers.{}.eh_proj.weight"


class DeepSeekV3StateDictAdapter(KeyMapAdapter):
    """Renames; RoPE pairs are neighbours here and in HF.

    V2's files have no correction bias for the router. Layers for multi-token prediction, which our
    model doesn't have, are left out on reading; they are recognised by their `eh_proj`.
    """

    model_args: DeepSeekV3ModelArgs
    quantized_format = "fp8"

    def __init__(self, model_args: DeepSeekV3ModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = dense_hf_key_map()
        for name in "qkv" if model_args.q_lora_rank else "kv":
            del self.from_hf_map[f"model.layers.{{}}.self_attn.{name}_proj.weight"]
        queries = _LATENT_QUERIES if model_args.q_lora_rank else {}
        self.from_hf_map |= block_hf_key_map(queries | _LATENTS_AND_SHARED_EXPERTS) | HF_EXPERTS
        bias = "model.layers.{}.mlp.gate.e_score_correction_bias"
        self.from_hf_map[bias] = "layers.{}.moe.expert_bias"

    def spelled_like(self, hf_names: Collection[str]) -> "DeepSeekV3StateDictAdapter":
        adapter = super().spelled_like(hf_names)
        adapter._ignore_mtp_layers(hf_names)
        return adapter

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        self._ignore_mtp_layers(hf_state_dict)
        return super().from_hf(hf_state_dict)

    def _ignore_mtp_layers(self, hf_names: Collection[str]) -> None:
        templates = (to_template(name) for name in hf_names)
        layers = [numbers[0] for template, numbers in templates if template == _MTP_PROJECTION]
        self.ignored_hf_keys = tuple(rf"model\.layers\.{layer}\." for layer in layers)
