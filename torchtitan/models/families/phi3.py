"""Phi-3, 3.5 and 4: Llama with files that join the weights of wq, wk and wv, and of w1 and w3."""

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import CausalLMArgs
from torchtitan.models.hf_adapter import Fused, HFKeyMap


def _names(args: CausalLMArgs) -> HFKeyMap:
    """Return the key map of the fused weights; it takes precedence over the names of unfused weights."""
    block, heads = "model.layers.{}", (args.n_heads, args.n_kv_heads, args.n_kv_heads)
    qkv = tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv"))
    gate_up = tuple(f"layers.{{}}.feed_forward.{name}.weight" for name in ("w1", "w3"))
    return {
        f"{block}.self_attn.qkv_proj.weight": Fused(qkv, rows=heads),
        f"{block}.mlp.gate_up_proj.weight": Fused(gate_up),
    }


_ROWS = (
    *hf_lm.DENSE,
    hf.Must("attention_bias", False, "attention has no biases"),
    hf.Must("resid_pdrop", 0.0, "training has no dropout here; set it to 0"),
    hf.Must("embd_pdrop", 0.0, "training has no dropout here; set it to 0"),
    hf.SILU,
    hf_lm.Layers(),
)
hf_types = {"phi3": hf.HFType("Phi3", _ROWS, names=_names)}

_PHI3 = {"model_type": "phi3", "rms_norm_eps": 1e-5, "rope_theta": 10000}
_MINI = hf_lm.sizes(3072, 32, 8192, 32, 32, vocab_size=32064, sliding_window=2047)
_PHI4 = hf_lm.sizes(5120, 40, 17920, 40, 10, vocab_size=100352, rope_theta=250000)
_TINY = hf_lm.sizes(256, 4, 768, 8, 2, **hf_lm.SMALL)
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _PHI3 | _TINY | {"max_position_embeddings": 131072},
        "Phi-3-mini-4k": _PHI3 | _MINI | {"max_position_embeddings": 4096},
        "Phi-4": _PHI3 | _PHI4 | {"max_position_embeddings": 16384},
    },
)
