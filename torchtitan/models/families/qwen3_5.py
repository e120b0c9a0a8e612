"""Qwen 3.5 (also 3.6 and 3.8), dense and with experts, and Qwen3-Next: text models."""

from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.causal_lm import CausalLMArgs
from torchtitan.models.hf_adapter import Fused, HFKeyMap
from torchtitan.models.hf_causal_lm import LINEAR_ATTENTION, Layers

# ---- Hugging Face's names ----


def _names(args: CausalLMArgs) -> HFKeyMap:
    """Return the key map of linear-attention layers.

    Its names contain the layer's index, because full-attention layers have different weights.
    """
    keys = args.linear_key_heads * args.linear_key_dim
    values = args.linear_value_heads * args.linear_value_dim
    qkv = (keys, keys, values)
    of_key_head = (*(n // args.linear_key_heads for n in qkv), values // args.linear_key_heads)
    table: HFKeyMap = {}
    for layer in range(args.n_layers):
        if args.kind_of(layer)[1].mixer != "gated_delta":
            continue

        def ours(*names: str, at: str = f"layers.{layer}.attention.") -> tuple[str, ...]:
            return tuple(at + name for name in names)

        convolutions = ours("conv_q", "conv_k", "conv_v")
        entries: dict[str, str | Fused] = {
            "conv1d.weight": Fused(convolutions, rows=qkv, has_middle=True)
        }
        if args.hf_type == "qwen3_next":
            names = ours("wq.weight", "wk.weight", "wv.weight", "wz.weight")
            joined = Fused(names, rows=of_key_head, n_groups=args.linear_key_heads)
            entries["in_proj_qkvz.weight"] = joined
            names = ours("wb.weight", "wa.weight")
            entries["in_proj_ba.weight"] = Fused(names, n_groups=args.linear_key_heads)
        else:
            names = ours("wq.weight", "wk.weight", "wv.weight")
            entries["in_proj_qkv.weight"] = Fused(names, rows=qkv)
            entries |= {f"in_proj_{n}.weight": ours(f"w{n}.weight")[0] for n in "zba"}
        for hf_name, name in {
            "A_log": "decay.A_log",
            "dt_bias": "decay.dt_bias",
            "norm.weight": "norm.weight",
            "out_proj.weight": "wo.weight",
        }.items():
            entries[hf_name] = ours(name)[0]
        at = f"model.layers.{layer}.linear_attn."
        table |= {at + hf_name: entry for hf_name, entry in entries.items()}
    return table


def _key_heads(n: int, config: hf.Config) -> int:
    if config["linear_num_value_heads"] % n:
        reason = f"it must divide the {config['linear_num_value_heads']} value heads"
        raise hf.refusal(config, "linear_num_key_heads", reason)
    return n


_ROWS = (
    hf.KV_HEADS,
    hf_lm.HEAD_DIM,
    *hf_lm.BIASES,
    hf.Field("linear_num_value_heads", "linear_value_heads"),
    hf.Field("linear_num_key_heads", "linear_key_heads", from_hf=_key_heads),
    hf.Field("linear_key_head_dim", "linear_key_dim"),
    hf.Field("linear_value_head_dim", "linear_value_dim"),
    hf.Field("linear_conv_kernel_dim", "linear_conv_width"),
    hf.SILU,
    hf.Must("attn_output_gate", True, "attention has a gate", default=True),
    hf.Must("output_gate_type", "swish", "linear attention is gated by SiLU", default="swish"),
    hf.Must("mamba_ssm_dtype", "float32", "states are in fp32", default="float32"),
    Layers(
        types=hf_lm.every(4, "full_attention_interval", LINEAR_ATTENTION),
        share=0.25,
    ),
)
_DENSE = (*_ROWS, hf.Field("intermediate_size", "hidden_dim"))
_EXPERTS = (*_ROWS, *hf_lm.QWEN_EXPERTS)
_NEXT = (
    *_EXPERTS,
    hf.Field("intermediate_size", "hidden_dim"),
    hf.Field("norm_topk_prob", "moe_args.route_norm", bool, True),
    hf_lm.QWEN_DENSE,
)
_ARGS: dict[str, Any] = {"norm_kind": "offset", "qk_norm": True, "attention_gate": True}
_MOE = _ARGS | hf.SOFTMAX_ROUTER
_MOE |= {"moe_enabled": True, "moe_args.num_shared_experts": 1, "moe_args.shared_expert_gate": True}
_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
_FILES: dict[str, Any] = {
    "names": _names,
    "prefixes": hf_lm.MULTIMODAL,
    # Layers for multi-token prediction are not trained.
    "left_out": (*hf_lm.VISION, r"mtp\."),
}
hf_types = {
    "qwen3_5_text": hf.HFType("Qwen3_5", _DENSE, _ARGS, _DEFAULTS, inside=("qwen3_5",), **_FILES),
    "qwen3_5_moe_text": hf.HFType(
        "Qwen3_5Moe",
        _EXPERTS,
        _MOE | {"moe_args.route_norm": True},
        _DEFAULTS,
        inside=("qwen3_5_moe",),
        **_FILES,
    ),
    "qwen3_next": hf.HFType("Qwen3Next", _NEXT, _MOE, _DEFAULTS, **_FILES),
}


# ---- flavors ----

_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
}


def _qwen(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, **others: Any) -> dict[str, Any]:
    return _QWEN3_5 | hf_lm.sizes(dim, n_layers, 11008, n_heads, n_kv_heads) | others


def _moe(num_experts: int, top_k: int, inter_dim: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inter_dim,
        "shared_expert_intermediate_size": inter_dim,
    }


_TIED = {"tie_word_embeddings": True}
_SMALL = hf_lm.SMALL | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_SMALL |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 768}
_NEXT_80B = _moe(512, 10, 512) | {"model_type": "qwen3_next", "intermediate_size": 5120}
_NEXT_80B |= {"vocab_size": 151936, "eos_token_id": 151643}
get_train_spec = hf_lm.train_spec_of(
    hf_types,
    {
        "debugmodel": _qwen(256, 4, 8, 2, **_SMALL),
        "debugmodel_moe": _qwen(256, 4, 8, 2, **_SMALL, **_moe(8, 2, 128)),
        "0.8B": _qwen(1024, 24, 8, 2, intermediate_size=3584, linear_num_value_heads=16, **_TIED),
        "2B": _qwen(2048, 24, 8, 2, intermediate_size=6144, linear_num_value_heads=16, **_TIED),
        "4B": _qwen(2560, 32, 16, 4, intermediate_size=9216, **_TIED),
        "9B": _qwen(4096, 32, 16, 4, intermediate_size=12288),
        "27B": _qwen(5120, 64, 24, 4, intermediate_size=17408, linear_num_value_heads=48),
        "35B-A3B": _qwen(2048, 40, 16, 2, **_moe(256, 8, 512)),
        "122B-A10B": _qwen(3072, 48, 32, 2, linear_num_value_heads=64, **_moe(256, 8, 1024)),
        "397B-A17B": _qwen(4096, 60, 32, 2, linear_num_value_heads=64, **_moe(512, 10, 1024)),
        "Next-80B-A3B": _qwen(2048, 48, 16, 2, **_NEXT_80B),
    },
)
