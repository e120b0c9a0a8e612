"""Seed-OSS: biases in queries, keys and values, and heads that are together wider than the model."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf

_ROWS = (
    *hf_lm.DENSE,
    hf.Field("attention_bias", "qkv_bias", bool, True),
    hf.Field("attention_out_bias", "output_bias", bool, False),
    hf.Field("mlp_bias", "mlp_bias", bool, False),
    hf.SILU,
    hf_lm.Layers(),
)
hf_types = {"seed_oss": hf.HFType("SeedOss", _ROWS)}

_36B = hf_lm.sizes(5120, 64, 27648, 80, 8, head_dim=128, vocab_size=155136)
_36B |= {"rms_norm_eps": 1e-6, "rope_theta": 1e7, "max_position_embeddings": 524288}
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, head_dim=64, vocab_size=2048)
_TINY |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 10000}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": {"model_type": "seed_oss"} | _TINY,
        "36B": {"model_type": "seed_oss"} | _36B,
    },
)
