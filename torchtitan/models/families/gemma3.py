"""Gemma 3's text model."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, CausalLMAdapter, Layers
from torchtitan.models.rope import LinearRoPE, RoPEArgs
from torchtitan.protocols.train_spec import TrainSpec

_ARGS: dict[str, Any] = {
    "norm_kind": "offset",
    "norm_placement": "both",
    "qk_norm": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Field(
        "hidden_size",
        "embedding_scale",
        from_hf=lambda dim, _: dim**0.5,
        to_hf=lambda args: args.dim,
    ),
    hf.Field(
        "query_pre_attn_scalar",
        "softmax_scale",
        from_hf=lambda size, _: size**-0.5,
        to_hf=lambda args: round(args.softmax_scale**-2),
    ),
    hf.Field("final_logit_softcapping", "logits_cap", float, None),
    hf.Must("attn_logit_softcapping", None, "scores are not capped here"),
    hf.Must("use_bidirectional_attention", False, "attention is causal here"),
    hf.Must("hidden_activation", "gelu_pytorch_tanh", "feed-forwards are gated by GELU"),
    Layers(
        types=hf_lm.every(6, "sliding_window_pattern"),
        window=4096,
        thetas={SLIDING_ATTENTION: 1e4, FULL_ATTENTION: 1e6},
    ),
)
# Published files leave these out.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_DEFAULTS |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_DEFAULTS |= {"query_pre_attn_scalar": 256}
hf_types = {
    "gemma3_text": hf.HFType(
        "Gemma3",
        _ROWS,
        _ARGS,
        _DEFAULTS,
        inside=("gemma3",),
        prefixes=hf_lm.MULTIMODAL,
        left_out=hf_lm.VISION,
    )
}


def _gemma3(
    dim: int,
    n_layers: int,
    hidden_dim: int,
    window: int,
    n_heads: int,
    n_kv_heads: int,
    factor: float | None = None,
    **fields: Any,
) -> CausalLMArgs:
    full = RoPEArgs(scaling=factor and LinearRoPE(factor))
    types = [FULL_ATTENTION if n % 6 == 5 else SLIDING_ATTENTION for n in range(n_layers)]
    fields = {"head_dim": 256, "softmax_scale": 256**-0.5, "vocab_size": 262144} | fields
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_seq_len=131072 if factor else 32768,
        enable_weight_tying=True,
        embedding_scale=dim**0.5,
        layer_kinds={
            SLIDING_ATTENTION: LayerKind(RoPEArgs(1e4), window),
            FULL_ATTENTION: LayerKind(full),
        },
        layer_types=tuple(types),
        attn_type="flex",
        hf_type="gemma3_text",
        **_ARGS,
        **fields,
    )


_MULTIMODAL = {"vocab_size": 262208}
_27B = {"head_dim": 128, "softmax_scale": 168**-0.5}
flavors = {
    "debugmodel": _gemma3(256, 6, 768, 64, 4, 2, vocab_size=2048, head_dim=64),
    "270M": _gemma3(640, 18, 2048, 512, 4, 1),
    "1B": _gemma3(1152, 26, 6912, 512, 4, 1),
    "4B": _gemma3(2560, 34, 10240, 1024, 8, 4, 8.0, **_MULTIMODAL),
    "12B": _gemma3(3840, 48, 15360, 1024, 16, 8, 8.0, **_MULTIMODAL),
    "27B": _gemma3(5376, 62, 21504, 1024, 32, 16, 8.0, **_MULTIMODAL, **_27B),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
