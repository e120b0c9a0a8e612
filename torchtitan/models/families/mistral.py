"""Mistral, Ministral 3 and Mixtral."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import CausalLMAdapter, Layers
from torchtitan.models.moe import MoEArgs
from torchtitan.models.rope import RoPEArgs, YaRNArgs
from torchtitan.protocols.train_spec import TrainSpec

_MIXTRAL_ROWS = (
    hf.KV_HEADS,
    hf_lm.HEAD_DIM,
    hf.Field("intermediate_size", "moe_inter_dim"),
    hf.Field("num_local_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.SILU,
    hf.NO_JITTER,
    Layers(theta=1e6),
)
_MIXTRAL_ARGS = hf.SOFTMAX_ROUTER | hf.NO_SHARED_EXPERTS | {"moe_args.route_norm": True}
_INSIDE: dict[str, Any] = {
    "inside": ("mistral3",),
    "prefixes": hf_lm.MULTIMODAL,
    "left_out": hf_lm.VISION,
}
hf_types = {
    "ministral3": hf.HFType(
        "Ministral3", (*hf_lm.DENSE, hf.SILU, Layers(has_query_scale=True)), **_INSIDE
    ),
    "mistral": hf.HFType("Mistral", (*hf_lm.DENSE, hf.SILU, Layers(window=4096)), **_INSIDE),
    "mixtral": hf.HFType(
        "Mixtral",
        _MIXTRAL_ROWS,
        _MIXTRAL_ARGS | {"moe_enabled": True},
        names=hf_lm.BLOCK_SPARSE_MOE,
    ),
}


def _mistral(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    fields = {"vocab_size": 131072, "max_seq_len": 131072, "hf_type": "mistral"} | fields
    return CausalLMArgs(dim=dim, n_layers=n_layers, hidden_dim=hidden_dim, **fields)


def _ministral3(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    rope = RoPEArgs(scaling=YaRNArgs(16, 16384))
    fields |= {"hf_type": "ministral3", "rope_theta": 1e6, "max_seq_len": 262144}
    fields |= {"layer_kinds": {FULL_ATTENTION: LayerKind(rope)}}
    return _mistral(dim, n_layers, hidden_dim, query_scale=0.1, query_scale_length=16384, **fields)


_EXPERTS = MoEArgs(8, 0, "softmax", route_norm=True, score_before_experts=False, top_k=2)


def _mixtral(dim: int, n_layers: int, moe_inter_dim: int, **fields: Any) -> CausalLMArgs:
    fields |= {"hf_type": "mixtral", "rope_theta": 1e6, "moe_enabled": True, "moe_args": _EXPERTS}
    return CausalLMArgs(dim=dim, n_layers=n_layers, moe_inter_dim=moe_inter_dim, **fields)


_OLD = {"vocab_size": 32000, "max_seq_len": 32768}
_SMALL = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
flavors = {
    "debugmodel": _mistral(256, 6, 768, **_SMALL),
    "debugmodel_moe": _mixtral(256, 6, 256, **_SMALL),
    "7B-v0.3": _mistral(4096, 32, 14336, rope_theta=1e6, **_OLD | {"vocab_size": 32768}),
    "Nemo-12B": _mistral(5120, 40, 14336, rope_theta=1e6),
    "Small-24B": _mistral(5120, 40, 32768, rope_theta=1e8, max_seq_len=32768),
    "Ministral-3-3B": _ministral3(3072, 26, 9216, enable_weight_tying=True),
    "Ministral-3-8B": _ministral3(4096, 34, 14336),
    "Ministral-3-14B": _ministral3(5120, 40, 16384),
    "Mixtral-8x7B": _mixtral(4096, 32, 14336, **_OLD),
    "Mixtral-8x22B": _mixtral(6144, 56, 16384, n_heads=48, vocab_size=32768, max_seq_len=65536),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
