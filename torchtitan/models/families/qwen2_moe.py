"""Qwen 1.5 and 2 with experts, of which one sees every token through a gate."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, CausalLMAdapter, Layers
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec


def _types(config: hf.Config) -> list[str]:
    """Return the types of layers: with windows in every other layer below max_window_layers."""
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


def _qwen2_moe(
    dim: int,
    n_layers: int,
    hidden_dim: int,
    moe_inter_dim: int,
    shared_dim: int,
    num_experts: int,
    top_k: int,
    **fields: Any,
) -> CausalLMArgs:
    experts = MoEArgs(
        num_experts,
        score_func="softmax",
        score_before_experts=False,
        top_k=top_k,
        shared_expert_dim=shared_dim,
        shared_expert_gate=True,
    )
    fields = {"rope_theta": 1e6, "vocab_size": 151936, "norm_eps": 1e-6} | fields
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        qkv_bias=True,
        moe_enabled=True,
        moe_inter_dim=moe_inter_dim,
        moe_args=experts,
        hf_type="qwen2_moe",
        **fields,
    )


_SMALL: dict[str, Any] = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
flavors = {
    "debugmodel": _qwen2_moe(256, 4, 768, 128, 256, 8, 2, **_SMALL),
    "1.5-MoE-A2.7B": _qwen2_moe(
        2048, 24, 5632, 1408, 5632, 60, 4, n_heads=16, n_kv_heads=16, max_seq_len=8192
    ),
    "57B-A14B": _qwen2_moe(
        3584, 28, 18944, 2560, 20480, 64, 8, n_heads=28, n_kv_heads=4, max_seq_len=131072
    ),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
