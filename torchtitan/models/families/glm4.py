"""GLM 4.5, 4.6 and 4.7; GLM-4.7-Flash, which has DeepSeek V3's architecture, is in `models.deepseek_v3`."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf

_ROWS = (
    *hf_lm.DENSE,
    hf.Field("attention_bias", "qkv_bias", bool, False),
    hf.Field("use_qk_norm", "qk_norm", bool, False),
    hf.Field("moe_intermediate_size", "moe_inter_dim"),
    hf.Field("n_routed_experts", "moe_args.num_experts"),
    hf.Field("n_shared_experts", "moe_args.num_shared_experts", hf.COUNT),
    *hf.ROUTER_GROUPS,
    hf.Field("norm_topk_prob", "moe_args.route_norm", bool, True),
    hf.Field("routed_scaling_factor", "moe_args.route_scale", float, 1.0),
    hf.TOP_K,
    hf_lm.FIRST_DENSE,
    hf.SILU,
    hf_lm.Layers(share=0.5),
)
hf_types = {"glm4_moe": hf.HFType("Glm4Moe", _ROWS, hf.SIGMOID_ROUTER | {"moe_enabled": True})}

_GLM4 = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
}
_AIR = hf_lm.sizes(4096, 46, 10944, 96, 8, moe_intermediate_size=1408, n_routed_experts=128)
_355B = hf_lm.sizes(5120, 92, 12288, 96, 8, moe_intermediate_size=1536, n_routed_experts=160)
_355B |= {"use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, moe_intermediate_size=256, n_routed_experts=8)
_TINY |= {"use_qk_norm": True, "num_experts_per_tok": 2, **hf_lm.SMALL}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _GLM4 | _TINY,
        "4.5-Air": _GLM4 | _AIR,
        "4.5": _GLM4 | _355B,
        "4.7": _GLM4 | _355B | {"max_position_embeddings": 202752},
    },
)
