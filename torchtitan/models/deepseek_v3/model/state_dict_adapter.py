"""DeepSeek weights under the names of Hugging Face's DeepseekV3ForCausalLM and V2's."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.hf_adapter import HF_EXPERTS, KeyMapAdapter, dense_hf_key_map, to_template

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

_ATTENTION = {
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
}
_DIRECT_QUERIES = {"q_proj": "wq"}
_LATENT_QUERIES = {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b"}
_SHARED_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MTP_PROJECTION = "model.layers.{}.eh_proj.weight"


class DeepSeekV3StateDictAdapter(KeyMapAdapter):
    """Renames; RoPE's pairs are neighbours on both sides.

    Files of V2 have no correction bias of the router. Layers for multi-token prediction, which
    the model has not, are left out on reading; their `eh_proj` tells them from others.
    """

    model_args: DeepSeekV3ModelArgs

    def __init__(self, model_args: DeepSeekV3ModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = dense_hf_key_map()
        for name in "qkv":
            del self.from_hf_map[f"model.layers.{{}}.self_attn.{name}_proj.weight"]
        queries = _LATENT_QUERIES if model_args.q_lora_rank else _DIRECT_QUERIES
        for hf, ours in (_ATTENTION | queries).items():
            hf_name = f"model.layers.{{}}.self_attn.{hf}.weight"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.{ours}.weight"
        self.from_hf_map |= HF_EXPERTS
        for hf, ours in _SHARED_EXPERTS.items():
            hf_name = f"model.layers.{{}}.mlp.shared_experts.{hf}.weight"
            self.from_hf_map[hf_name] = f"layers.{{}}.moe.shared_experts.{ours}.weight"
        bias = "model.layers.{}.mlp.gate.e_score_correction_bias"
        self.from_hf_map[bias] = "layers.{}.moe.expert_bias"

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> "HuggingFaceStorageReader":
        """A DCP reader; from_quantized: of fp8 blocks of 128 x 128 with scales, as fp32."""
        if not from_quantized:
            return super().get_hf_storage_reader(path)
        import torch
        from torch.distributed.checkpoint.quantized_hf_storage import (
            QuantizedHuggingFaceStorageReader,
        )

        return QuantizedHuggingFaceStorageReader(
            path, target_dtype=torch.float32, block_size=128, thread_count=4
        )

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
