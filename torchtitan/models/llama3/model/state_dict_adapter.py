"""Llama 3 weights under the names and layouts of Hugging Face's LlamaForCausalLM."""

from torch import Tensor

from torchtitan.models.hf_adapter import KeyMapAdapter, swap_rope_layout
from torchtitan.models.llama3.model.args import TransformerModelArgs

_BLOCK = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


class Llama3StateDictAdapter(KeyMapAdapter):
    """Renames, and reorders the rows of wq and wk: the two pair up rotated numbers differently."""

    model_args: TransformerModelArgs

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = {
            "model.embed_tokens.weight": "tok_embeddings.weight",
            "model.norm.weight": "norm.weight",
            "lm_head.weight": "output.weight",
            "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
            "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
            # Old files carry this table; it follows from the config.
            "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
        }
        for hf, ours in _BLOCK.items():
            for kind in ("weight", "bias"):
                self.from_hf_map[f"model.layers.{{}}.{hf}.{kind}"] = f"layers.{{}}.{ours}.{kind}"

    def tensor_to_hf(self, template: str, tensor: Tensor) -> Tensor:
        n_heads = self._rotated_heads(template)
        return swap_rope_layout(tensor, n_heads, to_hf=True) if n_heads else tensor

    def tensor_from_hf(self, template: str, tensor: Tensor) -> Tensor:
        n_heads = self._rotated_heads(template)
        return swap_rope_layout(tensor, n_heads, to_hf=False) if n_heads else tensor

    def _rotated_heads(self, template: str) -> int | None:
        """Number of heads in a projection whose output RoPE turns, None for all other tensors."""
        if ".attention.wq." in template:
            return self.model_args.n_heads
        if ".attention.wk." in template:
            return self.model_args.n_kv_heads or self.model_args.n_heads
        return None
