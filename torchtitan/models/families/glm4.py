"""GLM 4.5, 4.6 and 4.7; GLM-4.7-Flash has the shape of DeepSeek V3, and stands there."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import CausalLMAdapter, Layers
from torchtitan.models.moe import MoEArgs
from torchtitan.models.rope import RoPEArgs
from torchtitan.protocols.train_spec import TrainSpec

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
    Layers(share=0.5),
)
hf_types = {"glm4_moe": hf.HFType("Glm4Moe", _ROWS, hf.SIGMOID_ROUTER | {"moe_enabled": True})}


def _glm4(
    dim: int, n_layers: int, hidden_dim: int, moe_inter_dim: int, dense: int, **fields: Any
) -> CausalLMArgs:
    kinds = {FULL_ATTENTION: LayerKind(RoPEArgs(share=0.5))}
    fields = {"n_heads": 96, "vocab_size": 151552, "max_seq_len": 131072} | fields
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        qkv_bias=True,
        rope_theta=1e6,
        layer_kinds=kinds,
        moe_enabled=True,
        moe_inter_dim=moe_inter_dim,
        dense_layers=tuple(range(dense)),
        hf_type="glm4_moe",
        **fields,
    )


def _experts(num_experts: int, top_k: int = 8, route_scale: float = 1.0) -> MoEArgs:
    return MoEArgs(
        num_experts=num_experts,
        top_k=top_k,
        route_norm=True,
        route_scale=route_scale,
        score_before_experts=False,
    )


_SMALL: dict[str, Any] = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
_355B = {"qk_norm": True, "moe_args": _experts(160, route_scale=2.5), "max_seq_len": 202752}
flavors = {
    "debugmodel": _glm4(256, 4, 768, 256, 1, qk_norm=True, moe_args=_experts(8, 2), **_SMALL),
    "4.5-Air": _glm4(4096, 46, 10944, 1408, 1, moe_args=_experts(128)),
    "4.5": _glm4(5120, 92, 12288, 1536, 3, **_355B | {"max_seq_len": 131072}),
    "4.7": _glm4(5120, 92, 12288, 1536, 3, **_355B),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
