"""Gemma 3's text model."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, CausalLMAdapter, Layers
from torchtitan.models.rope import LinearRoPE, RoPEArgs
from torchtitan.protocols.train_spec import TrainSpec

GELU = "gelu_pytorch_tanh"
_ARGS: dict[str, Any] = {"norm_kind": "offset", "norm_placement": "both", "qk_norm": True}
_ARGS |= {"hidden_act": GELU}
# Those of Gemma 4, too.
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
    Layers(
        types=hf_lm.every(6, "sliding_window_pattern"),
        window=4096,
        thetas={SLIDING_ATTENTION: 1e4, FULL_ATTENTION: 1e6},
    ),
)
# Published files leave these out.
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


def _gemma3(
    dim: int, n_layers: int, hidden_dim: int, window: int, factor: float | None, **fields: Any
) -> CausalLMArgs:
    local, full = RoPEArgs(1e4), RoPEArgs(scaling=factor and LinearRoPE(factor))
    kinds = {SLIDING_ATTENTION: LayerKind(local, window), FULL_ATTENTION: LayerKind(full)}
    types = [SLIDING_ATTENTION if (n + 1) % 6 else FULL_ATTENTION for n in range(n_layers)]
    fields = {"head_dim": 256, "softmax_scale": 256**-0.5, "vocab_size": 262208} | fields
    fields |= {"layer_kinds": kinds, "layer_types": tuple(types), "attn_type": "flex", **_ARGS}
    fields |= {"norm_eps": 1e-6, "rope_theta": 1e6, "embedding_scale": dim**0.5}
    fields |= {"enable_weight_tying": True, "hf_type": "gemma3_text"}
    return CausalLMArgs(dim=dim, n_layers=n_layers, hidden_dim=hidden_dim, **fields)


_SHORT: dict[str, Any] = {"vocab_size": 262144, "max_seq_len": 32768, "n_heads": 4, "n_kv_heads": 1}
_27B = {"head_dim": 128, "softmax_scale": 168**-0.5}
flavors = {
    "debugmodel": _gemma3(256, 6, 768, 64, None, **_SHORT | {"vocab_size": 2048, "head_dim": 64}),
    "270M": _gemma3(640, 18, 2048, 512, None, **_SHORT),
    "1B": _gemma3(1152, 26, 6912, 512, None, **_SHORT),
    "4B": _gemma3(2560, 34, 10240, 1024, 8.0, n_heads=8, n_kv_heads=4),
    "12B": _gemma3(3840, 48, 15360, 1024, 8.0, n_heads=16, n_kv_heads=8),
    "27B": _gemma3(5376, 62, 21504, 1024, 8.0, n_heads=32, n_kv_heads=16, **_27B),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
