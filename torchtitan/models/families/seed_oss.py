"""Seed-OSS: biases in queries, keys and values, and heads that are together wider than the model."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import CausalLM, CausalLMArgs
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import CausalLMAdapter, Layers
from torchtitan.protocols.train_spec import TrainSpec

_ROWS = (
    *hf_lm.DENSE,
    hf.Field("attention_bias", "qkv_bias", bool, True),
    hf.Field("attention_out_bias", "output_bias", bool, False),
    hf.Field("mlp_bias", "mlp_bias", bool, False),
    hf.SILU,
    Layers(),
)
hf_types = {"seed_oss": hf.HFType("SeedOss", _ROWS)}
flavors = {
    "debugmodel": CausalLMArgs(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=2,
        head_dim=64,
        hidden_dim=768,
        vocab_size=2048,
        qkv_bias=True,
        hf_type="seed_oss",
    ),
    "36B": CausalLMArgs(
        dim=5120,
        n_layers=64,
        n_heads=80,
        hidden_dim=27648,
        vocab_size=155136,
        norm_eps=1e-6,
        rope_theta=1e7,
        max_seq_len=524288,
        qkv_bias=True,
        hf_type="seed_oss",
    ),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
