"""SmolLM3: every fourth layer has no RoPE."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION


def _windows(config: hf.Config) -> list[str]:
    """Return the layers' types: layers without RoPE have a window, if use_sliding_window is true."""
    has_window = [not rotates for rotates in hf_lm.has_rope(config)]
    return [hf_lm.SLIDING_ATTENTION if is_local else FULL_ATTENTION for is_local in has_window]


_ROWS = (
    *hf_lm.DENSE,
    *hf_lm.BIASES,
    hf.Must("mlp_bias", False, "feed-forwards have no biases"),
    hf.SILU,
    hf_lm.Layers(_windows, is_switched=True, lacks_rope=True, theta=2e6),
)
hf_types = {"smollm3": hf.HFType("SmolLM3", _ROWS)}

_SMOLLM3 = {
    "model_type": "smollm3",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _SMOLLM3 | hf_lm.sizes(256, 4, 768, 8, 2, **hf_lm.SMALL),
        "3B": _SMOLLM3 | hf_lm.sizes(2048, 36, 11008, 16, 4),
    },
)
