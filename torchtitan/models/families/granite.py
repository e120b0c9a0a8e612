"""Granite 3: Llama with factors on embeddings, residual branches, attention scores and logits."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf

_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Field("mlp_bias", "mlp_bias", bool, False),
    hf.Field("embedding_multiplier", "embedding_scale", float, 1.0),
    hf.Field("residual_multiplier", "residual_scale", float, 1.0),
    hf.Field("attention_multiplier", "softmax_scale", float, 1.0),
    hf.Field("logits_scaling", "logits_divisor", float, 1.0),
    hf.SILU,
    hf_lm.Layers(),
)
hf_types = {"granite": hf.HFType("Granite", _ROWS)}

_GRANITE = {
    "model_type": "granite",
    "vocab_size": 49155,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_2B = hf_lm.sizes(2048, 40, 8192, 32, 8, attention_multiplier=1 / 64)
_8B = hf_lm.sizes(4096, 40, 12800, 32, 8, attention_multiplier=1 / 128, logits_scaling=16.0)
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, attention_multiplier=1 / 32)
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _GRANITE | _TINY | hf_lm.SMALL,
        "3.3-2B": _GRANITE | _2B,
        "3.3-8B": _GRANITE | _8B,
    },
)
