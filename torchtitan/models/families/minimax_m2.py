"""MiniMax-M2, 2.1 and 2.5."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLMArgs
from torchtitan.models.hf_causal_lm import Layers


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
            for module in ("block_sparse_moe", "mlp")  # in files, and in transformers' state dicts
        },
    )
}

_M2 = {
    "model_type": "minimax_m2",
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 196608,
}
_TINY = hf_lm.sizes(256, 4, 256, 8, 2, num_local_experts=16, rotary_dim=16, **hf_lm.SMALL)
_229B = hf_lm.sizes(3072, 62, 1536, 48, 8, num_local_experts=256, head_dim=128, vocab_size=200064)
get_train_spec = hf_lm.train_spec_of(hf_types, {"debugmodel": _M2 | _TINY, "M2": _M2 | _229B})
