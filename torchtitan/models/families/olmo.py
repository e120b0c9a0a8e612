"""OLMo 2, OLMo 3 and OLMoE."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, Layers

_AFTER = {"norm_kind": "early", "norm_placement": "after", "qk_norm": "whole"}
_OLMOE_ARGS = {"qk_norm": "whole", "moe_enabled": True}
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
_OLMO3_LAYERS = Layers(types=hf_lm.every(4), window=4096, thetas=_THETAS)
hf_types = {
    "olmo2": hf.HFType("Olmo2", (*_ROWS, Layers()), _AFTER),
    "olmo3": hf.HFType("Olmo3", (*_ROWS, _OLMO3_LAYERS), _AFTER),
    "olmoe": hf.HFType(
        "Olmoe", _OLMOE_ROWS, _OLMOE_ARGS | hf.SOFTMAX_ROUTER | hf.NO_SHARED_EXPERTS
    ),
}

_OLMO2 = {
    "model_type": "olmo2",
    "head_dim": 128,
    "vocab_size": 100352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "max_position_embeddings": 4096,
}
_YARN = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 8192}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_OLMO3 = _OLMO2 | {"model_type": "olmo3", "vocab_size": 100278, "rope_scaling": _YARN}
_OLMO3 |= {"max_position_embeddings": 65536}
_OLMOE = _OLMO2 | {"model_type": "olmoe", "vocab_size": 50304, "rms_norm_eps": 1e-5}
_OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "rope_theta": 10000}
_FEW = {"num_experts": 8, "num_experts_per_tok": 2}
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, **hf_lm.SMALL)
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _OLMO2 | _TINY,
        "debugmodel_window": _OLMO3 | _TINY,
        "debugmodel_moe": _OLMOE | _TINY | _FEW | {"intermediate_size": 256},
        "OLMo-2-1B": _OLMO2 | hf_lm.sizes(2048, 16, 8192, 16, 16),
        "OLMo-2-7B": _OLMO2 | hf_lm.sizes(4096, 32, 11008, 32, 32),
        "OLMo-2-13B": _OLMO2 | hf_lm.sizes(5120, 40, 13824, 40, 40),
        "OLMo-2-32B": _OLMO2 | hf_lm.sizes(5120, 64, 27648, 40, 8),
        "OLMo-3-7B": _OLMO3 | hf_lm.sizes(4096, 32, 11008, 32, 32),
        "OLMo-3-32B": _OLMO3 | hf_lm.sizes(5120, 64, 27648, 40, 8),
        "OLMoE-1B-7B": _OLMOE | hf_lm.sizes(2048, 16, 1024, 16, 16),
    },
)
