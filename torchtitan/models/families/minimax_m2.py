"""MiniMax-M2, 2.1 and 2.5."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import CausalLMAdapter, Layers
from torchtitan.models.moe import MoEArgs
from torchtitan.models.rope import RoPEArgs
from torchtitan.protocols.train_spec import TrainSpec


def _share(args: CausalLMArgs) -> float:
    rope = args.layer_kinds[FULL_ATTENTION].rope
    assert rope is not None
    return rope.share


_BIAS = "e_score_correction_bias"
_ARGS = hf.SIGMOID_ROUTER | hf.NO_SHARED_EXPERTS
_ARGS |= {"moe_args.route_norm": True, "moe_enabled": True, "qk_norm": "whole"}
_ROWS = (
    hf.KV_HEADS,
    hf_lm.HEAD_DIM,
    hf.Field("intermediate_size", "moe_inter_dim"),
    hf.Field("num_local_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Must("scoring_func", "sigmoid", "the router's scores are sigmoids"),
    hf.Must("use_routing_bias", True, "a bias corrects the choice of experts"),
    hf.Must("use_qk_norm", True, "queries and keys are normalised"),
    hf.Must("qk_norm_type", "per_layer", "all heads are normalised at once"),
    hf.Must("router_jitter_noise", 0.0, "a router's input has no noise here"),
    hf.SILU,
    hf.Must(
        "rotary_dim",
        lambda args: int(_share(args) * args.head_dim),
        "partial_rotary_factor says otherwise",
    ),
    Layers(theta=5e6, share=lambda config: config.get("rotary_dim", 64) / config["head_dim"]),
)
hf_types = {
    "minimax_m2": hf.HFType(
        "MiniMaxM2",
        _ROWS,
        _ARGS,
        names=hf_lm.BLOCK_SPARSE_MOE
        | {
            f"model.layers.{{}}.{module}.{_BIAS}": "layers.{}.moe.expert_bias"
            for module in ("block_sparse_moe", "mlp")  # the second is transformers' in memory
        },
    )
}


def _minimax(dim: int, n_layers: int, moe_inter_dim: int, experts: int, **fields: Any) -> Any:
    fields = {"norm_eps": 1e-6, "max_seq_len": 196608} | fields
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        qk_norm="whole",
        rope_theta=5e6,
        layer_kinds={FULL_ATTENTION: LayerKind(RoPEArgs(share=0.5))},
        moe_enabled=True,
        moe_inter_dim=moe_inter_dim,
        moe_args=MoEArgs(experts, 0, route_norm=True, score_before_experts=False, top_k=8),
        hf_type="minimax_m2",
        **fields,
    )


_SMALL: dict[str, Any] = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
flavors = {
    "debugmodel": _minimax(256, 4, 256, 16, **_SMALL),
    "M2": _minimax(3072, 62, 1536, 256, n_heads=48, vocab_size=200064),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
