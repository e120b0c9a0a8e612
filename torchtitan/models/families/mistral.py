"""Mistral, Ministral 3 and Mixtral."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.hf_causal_lm import Layers

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

_LONG = {"vocab_size": 131072, "max_position_embeddings": 131072}
_OLD = {"vocab_size": 32000, "max_position_embeddings": 32768}
_ALL = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}
_MISTRAL = {"model_type": "mistral", **_ALL, **_LONG, "rope_theta": 10000}
_YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 16384}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_YARN |= {"llama_4_scaling_beta": 0.1}
_MINISTRAL3: dict[str, Any] = {"model_type": "ministral3", **_ALL, **_LONG, "rope_theta": 1e6}
_MINISTRAL3 |= {"max_position_embeddings": 262144, "rope_scaling": _YARN}
_MIXTRAL = {"model_type": "mixtral", **_ALL, **_LONG, "rope_theta": 1e6}
_MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _MISTRAL | hf_lm.sizes(256, 6, 768, 8, 2, **hf_lm.SMALL),
        "debugmodel_moe": _MIXTRAL | hf_lm.sizes(256, 6, 256, 8, 2, **hf_lm.SMALL),
        "7B-v0.3": _MISTRAL
        | _OLD
        | hf_lm.sizes(4096, 32, 14336, 32, 8, vocab_size=32768, rope_theta=1e6),
        "Nemo-12B": _MISTRAL | hf_lm.sizes(5120, 40, 14336, 32, 8, rope_theta=1e6),
        "Small-24B": _MISTRAL
        | hf_lm.sizes(5120, 40, 32768, 32, 8, rope_theta=1e8, max_position_embeddings=32768),
        "Ministral-3-3B": _MINISTRAL3
        | hf_lm.sizes(3072, 26, 9216, 32, 8, tie_word_embeddings=True),
        "Ministral-3-8B": _MINISTRAL3 | hf_lm.sizes(4096, 34, 14336, 32, 8),
        "Ministral-3-14B": _MINISTRAL3 | hf_lm.sizes(5120, 40, 16384, 32, 8),
        "Mixtral-8x7B": _MIXTRAL | _OLD | hf_lm.sizes(4096, 32, 14336, 32, 8),
        "Mixtral-8x22B": _MIXTRAL
        | hf_lm.sizes(6144, 56, 16384, 48, 8, vocab_size=32768, max_position_embeddings=65536),
    },
)
