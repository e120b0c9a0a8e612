"""Llama 3 weights under the names and layouts of Hugging Face's LlamaForCausalLM."""

from torch import Tensor

from torchtitan.models.hf_adapter import (
    HF_LINEARS,
    KeyMapAdapter,
    dense_hf_key_map,
    swap_rope_layout,
)
from torchtitan.models.llama3.model.args import TransformerModelArgs


class Llama3StateDictAdapter(KeyMapAdapter):
    """Renames, and reorders the rows of wq and wk: the two pair up rotated numbers differently."""

    model_args: TransformerModelArgs

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = dense_hf_key_map(biased=HF_LINEARS)

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
