"""Llama 3 weights under the names and layouts of Hugging Face's LlamaForCausalLM."""

from torchtitan.models.hf_adapter import HF_LINEARS, KeyMapAdapter, dense_hf_key_map
from torchtitan.models.llama3.model.args import TransformerModelArgs


class Llama3StateDictAdapter(KeyMapAdapter):
    """Renames, and reorders the rows of wq and wk, because HF pairs rotated numbers differently."""

    model_args: TransformerModelArgs

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None):
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map = dense_hf_key_map(biased=HF_LINEARS)
        n_heads = model_args.n_heads
        heads = {"wq": n_heads, "wk": model_args.n_kv_heads or n_heads}
        self.rotated_heads = {
            f"layers.{{}}.attention.{name}.{kind}": n
            for name, n in heads.items()
            for kind in ("weight", "bias")
        }
