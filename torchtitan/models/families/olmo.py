"""OLMo 2, OLMo 3 and OLMoE."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, CausalLMAdapter, Layers
from torchtitan.models.moe import MoEArgs
from torchtitan.models.rope import RoPEArgs, YaRNArgs, yarn_mscale
from torchtitan.protocols.train_spec import TrainSpec

_AFTER = {"norm_kind": "early", "norm_placement": "after", "qk_norm": "whole"}
_OLMOE = {"qk_norm": "whole", "moe_enabled": True}
_ROWS = (*hf_lm.DENSE, *hf_lm.BIASES, hf.SILU)
_OLMOE_ROWS = (
    hf.KV_HEADS,
    hf_lm.HEAD_DIM,
    *hf_lm.BIASES,
    hf.Field("intermediate_size", "moe_inter_dim"),
    hf.Field("num_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Field("norm_topk_prob", "moe_args.route_norm", bool, False),
    hf.Must("clip_qkv", None, "queries, keys and values are not clamped here"),
    hf.SILU,
    Layers(),
)
_THETAS = {SLIDING_ATTENTION: 5e5, FULL_ATTENTION: 5e5}
_OLMO3 = Layers(types=hf_lm.every(4), window=4096, thetas=_THETAS)
hf_types = {
    "olmo2": hf.HFType("Olmo2", (*_ROWS, Layers()), _AFTER),
    "olmo3": hf.HFType("Olmo3", (*_ROWS, _OLMO3), _AFTER),
    "olmoe": hf.HFType("Olmoe", _OLMOE_ROWS, _OLMOE | hf.SOFTMAX_ROUTER | hf.NO_SHARED_EXPERTS),
}


def _olmo2(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    fields = {"n_heads": dim // 128, "n_kv_heads": dim // 128, "max_seq_len": 4096} | fields
    fields = {"vocab_size": 100352, "norm_eps": 1e-6, "hf_type": "olmo2"} | fields
    return CausalLMArgs(
        dim=dim, n_layers=n_layers, hidden_dim=hidden_dim, rope_theta=5e5, **_AFTER, **fields
    )


def _olmo3(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    yarn = RoPEArgs(scaling=YaRNArgs(8, 8192), magnitude=yarn_mscale(8))
    kinds = {SLIDING_ATTENTION: LayerKind(window=4096), FULL_ATTENTION: LayerKind(yarn)}
    types = ([SLIDING_ATTENTION] * 3 + [FULL_ATTENTION]) * (n_layers // 4)
    layers = {"layer_kinds": kinds, "layer_types": tuple(types), "attn_type": "flex"}
    fields = {"vocab_size": 100278, "max_seq_len": 65536, "hf_type": "olmo3"} | layers | fields
    return _olmo2(dim, n_layers, hidden_dim, **fields)


def _olmoe(dim: int, n_layers: int, moe_inter_dim: int, **fields: Any) -> CausalLMArgs:
    experts = MoEArgs(64, 0, "softmax", score_before_experts=False, top_k=8)
    fields = {"n_heads": 16, "n_kv_heads": 16, "vocab_size": 50304, "moe_args": experts} | fields
    fields |= _OLMOE | {"max_seq_len": 4096, "hf_type": "olmoe"}
    return CausalLMArgs(dim=dim, n_layers=n_layers, moe_inter_dim=moe_inter_dim, **fields)


_SMALL = {"vocab_size": 2048, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
_FEW = {"moe_args": MoEArgs(8, 0, "softmax", score_before_experts=False, top_k=2)}
flavors = {
    "debugmodel": _olmo2(256, 4, 768, **_SMALL),
    "debugmodel_window": _olmo3(256, 4, 768, **_SMALL),
    "debugmodel_moe": _olmoe(256, 4, 256, **_SMALL, **_FEW),
    "OLMo-2-1B": _olmo2(2048, 16, 8192),
    "OLMo-2-7B": _olmo2(4096, 32, 11008),
    "OLMo-2-13B": _olmo2(5120, 40, 13824),
    "OLMo-2-32B": _olmo2(5120, 64, 27648, n_kv_heads=8),
    "OLMo-3-7B": _olmo3(4096, 32, 11008),
    "OLMo-3-32B": _olmo3(5120, 64, 27648, n_kv_heads=8),
    "OLMoE-1B-7B": _olmoe(2048, 16, 1024),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
