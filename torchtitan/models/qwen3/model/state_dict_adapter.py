"""Qwen 3 weights under the names of Hugging Face's Qwen3ForCausalLM and Qwen2ForCausalLM."""

from torchtitan.models.hf_adapter import (
    HF_EXPERTS,
    KeyMapAdapter,
    block_hf_key_map,
    dense_hf_key_map,
)
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs


class Qwen3StateDictAdapter(KeyMapAdapter):
    """Renames; the table has biases and norms of queries and keys only if the args have them."""

    model_args: Qwen3ModelArgs

    def __init__(self, model_args: Qwen3ModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        biased = [f"self_attn.{name}_proj" for name in "qkv"] if model_args.qkv_bias else []
        self.from_hf_map = dense_hf_key_map(biased)
        if model_args.qk_norm:
            self.from_hf_map |= block_hf_key_map(
                {f"self_attn.{norm}": f"attention.{norm}" for norm in ("q_norm", "k_norm")}
            )
        if model_args.moe_enabled:
            self.from_hf_map |= HF_EXPERTS
