"""Gemma 4's text model (31B), for configs without experts, per-layer inputs or layers that share keys."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLMArgs, LayerKind
from torchtitan.models.families.gemma3 import GELU, SHARED_ROWS
from torchtitan.models.hf_causal_lm import SLIDING_ATTENTION, Layers

_ARGS: dict[str, Any] = {"norm_kind": "early", "norm_placement": "both", "qk_norm": True}
_ARGS |= {"v_norm": True, "softmax_scale": 1.0, "layer_scale": True, "hidden_act": GELU}
_SIZES = {"head_dim": "head_dim", "num_key_value_heads": "n_kv_heads"}
_GLOBAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class _Layers(Layers):
    """`Layers` for models whose full-attention layers have head sizes of their own.

    The last layer always has full attention.
    """

    @property
    def fields(self) -> Iterable[str]:
        own = "global_head_dim num_global_key_value_heads attention_k_eq_v per_layer_config"
        return [*super().fields, *own.split()]

    def read(self, config: hf.Config) -> dict[str, Any]:
        for name in ("rope_theta", "rope_scaling"):
            hf.require(config, name, (), "rope_parameters must have a table for each type of layer")
        hf.check_kind(config, "attention_k_eq_v", bool)
        types = [*(config.get("layer_types") or hf_lm.every(6)(config))[:-1], FULL_ATTENTION]
        tables = config.get("rope_parameters") or {FULL_ATTENTION: _GLOBAL_ROPE}
        values = super().read({**config, "layer_types": types, "rope_parameters": tables})

        sizes = {"head_dim": config["global_head_dim"]}
        n_kv_heads = config.get("num_global_key_value_heads")
        if n_kv_heads is not None and config["attention_k_eq_v"]:
            sizes["num_key_value_heads"] = n_kv_heads
        full_layers = [str(n) for n, name in enumerate(types) if name == FULL_ATTENTION]
        by_layer = config.get("per_layer_config")  # transformers writes the sizes to this field
        if by_layer is not None:
            sizes = next(iter(by_layer.values()), {})
            given = {str(layer): own for layer, own in by_layer.items()}
            if given != dict.fromkeys(full_layers, sizes) or not {*sizes} <= {*_SIZES}:
                reason = f"only layers {', '.join(full_layers)} may have own {' and '.join(_SIZES)}"
                raise hf.refusal(config, "per_layer_config", f"{reason}, all with equal values")
        for name in sizes:
            hf.check_kind(sizes, name, hf.SIZE)
        if sizes.get("head_dim", 0) % 2:
            raise hf.refusal(sizes, "head_dim", "RoPE rotates an even number of dimensions")
        facts = {_SIZES[name]: size for name, size in sizes.items() if size != config[name]}
        full = values["layer_kinds"][FULL_ATTENTION]
        values["layer_kinds"][FULL_ATTENTION] = dataclasses.replace(
            full, values_from_keys=config["attention_k_eq_v"], **facts
        )
        return values

    def write(self, args: CausalLMArgs) -> dict[str, Any]:
        kind = args.layer_kinds.get(FULL_ATTENTION, LayerKind())
        return super().write(args) | {
            "global_head_dim": args.head_dim_of(kind),
            "num_global_key_value_heads": kind.n_kv_heads,
            "attention_k_eq_v": kind.values_from_keys,
        }


_THETAS = {SLIDING_ATTENTION: 1e4, FULL_ATTENTION: 1e6}
_ROWS = (
    *SHARED_ROWS,
    hf.Must("num_kv_shared_layers", 0, "every layer has its own keys and values here"),
    hf.Must("hidden_size_per_layer_input", 0, "layers have no inputs of their own here"),
    hf.Must("enable_moe_block", False, "layers have no experts here"),
    hf.Must("num_experts", None, "layers have no experts here", is_written=False),
    hf.Must("moe_intermediate_size", None, "layers have no experts here", is_written=False),
    # With "vision" only the tokens of an image have bidirectional attention.
    hf.Must("use_bidirectional_attention", "vision", "text is causal here", is_written=False),
    _Layers(types=hf_lm.every(6), window=512, thetas=_THETAS),
)
# The config.json files of published models omit these fields.
_DEFAULTS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, global_head_dim=512)
_DEFAULTS |= dict(vocab_size=262144, hidden_size_per_layer_input=256, attention_k_eq_v=False)
_DEFAULTS |= dict(rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=True)
_INSIDE: dict[str, Any] = {"inside": ("gemma4",), "prefixes": hf_lm.MULTIMODAL}
_INSIDE |= {"left_out": (r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.",)}
_INSIDE |= {"names": {"model.layers.{}.layer_scalar": "layers.{}.layer_scale"}}
hf_types = {"gemma4_text": hf.HFType("Gemma4", _ROWS, _ARGS, _DEFAULTS, **_INSIDE)}

_SMALL = {"sliding_window": 64, "head_dim": 64, "global_head_dim": 128, "vocab_size": 2048}
_SMALL |= {"num_global_key_value_heads": 1, "max_position_embeddings": 32768}
_31B = {"sliding_window": 1024, "num_global_key_value_heads": 4, "max_position_embeddings": 262144}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _GEMMA4 | hf_lm.sizes(256, 6, 768, 4, 2, **_SMALL),
        "31B": _GEMMA4 | hf_lm.sizes(5376, 60, 21504, 32, 16, **_31B),
    },
)
