"""Phi-3, 3.5 and 4: Llama, whose files join queries, keys and values, and gate and up."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import CausalLM, CausalLMArgs
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_adapter import Fused, HFKeyMap
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, CausalLMAdapter, LayerKind, Layers
from torchtitan.protocols.train_spec import TrainSpec


def _names(args: CausalLMArgs) -> HFKeyMap:
    """Return the names of the joined weights, and take those of the parts out."""
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
    Layers(),
)
hf_types = {"phi3": hf.HFType("Phi3", _ROWS, names=_names)}


def _phi3(dim: int, n_layers: int, hidden_dim: int, **fields: Any) -> CausalLMArgs:
    return CausalLMArgs(dim=dim, n_layers=n_layers, hidden_dim=hidden_dim, hf_type="phi3", **fields)


_WINDOW = {"layer_kinds": {SLIDING_ATTENTION: LayerKind(window=2047)}, "attn_type": "flex"}
flavors = {
    "debugmodel": _phi3(256, 4, 768, vocab_size=2048, n_heads=8, n_kv_heads=2, head_dim=32),
    "Phi-3-mini-4k": _phi3(
        3072, 32, 8192, n_kv_heads=32, head_dim=96, vocab_size=32064, max_seq_len=4096, **_WINDOW
    ),
    "Phi-4": _phi3(
        5120,
        40,
        17920,
        n_heads=40,
        n_kv_heads=10,
        vocab_size=100352,
        rope_theta=250000,
        max_seq_len=16384,
    ),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
