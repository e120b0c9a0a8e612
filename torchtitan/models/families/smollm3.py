"""SmolLM3: every fourth layer has no RoPE."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_causal_lm import NO_ROPE, CausalLMAdapter, Layers
from torchtitan.protocols.train_spec import TrainSpec


def _windows(config: hf.Config) -> list[str]:
    """Return the types of layers: windows are on the layers without RoPE, if use_sliding_window is true."""
    has_window = [not rotates for rotates in hf_lm.has_rope(config)]
    return [hf_lm.SLIDING_ATTENTION if is_local else FULL_ATTENTION for is_local in has_window]


_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Must("mlp_bias", False, "feed-forwards have no biases"),
    hf.SILU,
    Layers(_windows, is_switched=True, lacks_rope=True, theta=2e6),
)
hf_types = {"smollm3": hf.HFType("SmolLM3", _ROWS)}


def _smollm3(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    kinds = {FULL_ATTENTION: LayerKind(), FULL_ATTENTION + NO_ROPE: LayerKind(None)}
    types = [FULL_ATTENTION if (n + 1) % 4 else FULL_ATTENTION + NO_ROPE for n in range(n_layers)]
    return CausalLMArgs(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        norm_eps=1e-6,
        rope_theta=5e6,
        max_seq_len=65536,
        enable_weight_tying=True,
        layer_kinds=kinds,
        layer_types=tuple(types),
        hf_type="smollm3",
        **fields,
    )


flavors = {
    "debugmodel": _smollm3(256, 4, 768, vocab_size=2048, n_heads=8, n_kv_heads=2, head_dim=32),
    "3B": _smollm3(2048, 36, 11008, n_heads=16, n_kv_heads=4),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
