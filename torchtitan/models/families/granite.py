"""Granite 3: Llama with factors on embeddings, residual branches, attention scores and logits."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import CausalLM, CausalLMArgs
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import CausalLMAdapter, Layers
from torchtitan.protocols.train_spec import TrainSpec

_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Field("mlp_bias", "mlp_bias", bool, False),
    hf.Field("embedding_multiplier", "embedding_scale", float, 1.0),
    hf.Field("residual_multiplier", "residual_scale", float, 1.0),
    hf.Field("attention_multiplier", "softmax_scale", float, 1.0),
    hf.Field("logits_scaling", "logits_divisor", float, 1.0),
    hf.SILU,
    Layers(),
)
hf_types = {"granite": hf.HFType("Granite", _ROWS)}


def _granite(
    dim: int, n_layers: int, hidden_dim: int, head_dim: int, **fields: Any
) -> CausalLMArgs:
    fields = {"n_heads": 32, "vocab_size": 49155, "max_seq_len": 131072} | fields
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        head_dim=head_dim,
        rope_theta=1e7,
        enable_weight_tying=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        softmax_scale=1 / head_dim,
        hf_type="granite",
        **fields,
    )


_SMALL: dict[str, Any] = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2}
flavors = {
    "debugmodel": _granite(256, 4, 768, 32, logits_divisor=8.0, **_SMALL),
    "3.3-2B": _granite(2048, 40, 8192, 64, logits_divisor=8.0),
    "3.3-8B": _granite(4096, 40, 12800, 128, logits_divisor=16.0),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
