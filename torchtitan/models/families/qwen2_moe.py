"""Qwen 1.5 and 2 with experts, and with a gated shared expert that sees every token."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, Layers


def _types(config: hf.Config) -> list[str]:
    """Return the layers' types: layers 0, 2, 4, ... below max_window_layers have a window."""
    last = config.get("max_window_layers", 28)
    local = [(n + 1) % 2 and n < last for n in range(config["num_hidden_layers"])]
    return [SLIDING_ATTENTION if is_local else FULL_ATTENTION for is_local in local]


_GATED = {"moe_args.num_shared_experts": 1, "moe_args.shared_expert_gate": True}
_ROWS = (
    *hf_lm.DENSE,
    hf.Field("qkv_bias", "qkv_bias", bool, True),
    *hf_lm.QWEN_EXPERTS,
    hf.Field("norm_topk_prob", "moe_args.route_norm", bool, False),
    hf_lm.QWEN_DENSE,
    hf.SILU,
    Layers(_types, window=4096, is_switched=True),
)
hf_types = {
    "qwen2_moe": hf.HFType("Qwen2Moe", _ROWS, hf.SOFTMAX_ROUTER | _GATED | {"moe_enabled": True})
}

_QWEN2 = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
}


def _experts(number: int, per_token: int, size: int, shared_size: int) -> dict[str, int]:
    return {
        "num_experts": number,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": shared_size,
    }


_A2_7B = hf_lm.sizes(2048, 24, 5632, 16, 16, **_experts(60, 4, 1408, 5632))
_A14B = hf_lm.sizes(3584, 28, 18944, 28, 4, **_experts(64, 8, 2560, 20480))
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, **_experts(8, 2, 128, 256), **hf_lm.SMALL)
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _QWEN2 | _TINY,
        "1.5-MoE-A2.7B": _QWEN2 | _A2_7B | {"max_position_embeddings": 8192},
        "57B-A14B": _QWEN2 | _A14B,
    },
)
