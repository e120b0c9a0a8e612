"""Gemma 3's text model."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION

GELU = "gelu_pytorch_tanh"
_ARGS: dict[str, Any] = {"norm_kind": "offset", "norm_placement": "both", "qk_norm": True}
_ARGS |= {"hidden_act": GELU}
# How config.json maps to our args; the same for Gemma 3 and Gemma 4.
SHARED_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Field("hidden_size", "embedding_scale", from_hf=lambda m, _: m**0.5, to_hf=lambda a: a.dim),
    hf.Field("final_logit_softcapping", "logits_cap", float, None),
    hf.Must("hidden_activation", GELU, "feed-forwards are gated by GELU"),
)
_ROWS = (
    *SHARED_ROWS,
    hf.Field(
        "query_pre_attn_scalar",
        "softmax_scale",
        from_hf=lambda size, _: size**-0.5,
        to_hf=lambda args: round(args.softmax_scale**-2),
    ),
    hf.Must("attn_logit_softcapping", None, "scores are not capped here"),
    hf.Must("use_bidirectional_attention", False, "attention is causal here"),
    hf_lm.Layers(
        types=hf_lm.every(6, "sliding_window_pattern"),
        window=4096,
        thetas={SLIDING_ATTENTION: 1e4, FULL_ATTENTION: 1e6},
    ),
)
# The config.json files of published models omit these fields.
_DEFAULTS = dict(
    vocab_size=262208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
)
_INSIDE = {"inside": ("gemma3",), "prefixes": hf_lm.MULTIMODAL, "left_out": hf_lm.VISION}
hf_types = {"gemma3_text": hf.HFType("Gemma3", _ROWS, _ARGS, _DEFAULTS, **_INSIDE)}

_GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 512}
_SHORT = _GEMMA3 | {"vocab_size": 262144, "max_position_embeddings": 32768}
_LONG = _GEMMA3 | {"sliding_window": 1024}
_LONG |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_27B = {"head_dim": 128, "query_pre_attn_scalar": 168}
_TINY = _SHORT | {"vocab_size": 2048, "head_dim": 64, "sliding_window": 64}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _TINY | hf_lm.sizes(256, 6, 768, 4, 1),
        "270M": _SHORT | hf_lm.sizes(640, 18, 2048, 4, 1),
        "1B": _SHORT | hf_lm.sizes(1152, 26, 6912, 4, 1),
        "4B": _LONG | hf_lm.sizes(2560, 34, 10240, 8, 4),
        "12B": _LONG | hf_lm.sizes(3840, 48, 15360, 16, 8),
        "27B": _LONG | hf_lm.sizes(5376, 62, 21504, 32, 16, **_27B),
    },
)
