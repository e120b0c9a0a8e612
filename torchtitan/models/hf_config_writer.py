"""Writes the config.json of a model: the inverse of `hf_config`, by the same tables.

The spelling is that of transformers 4 (rope_theta, rope_scaling), which transformers 5 and vLLM also
read.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchtitan.models import hf_config
from torchtitan.protocols.train_spec import get_train_spec


def to_hf_config(model_args: Any) -> dict[str, Any]:
    """Return the content of a config.json that describes a model with these args.

    It has no token ids and no dtype, because the args don't have them.
    Raises ValueError if Hugging Face has no model with these args.
    """
    writers = {}
    for family, write in _WRITERS.items():
        some_args = next(iter(get_train_spec(family).model_args.values()))
        writers[type(some_args)] = write
    if type(model_args) not in writers:
        raise ValueError(f"{type(model_args).__name__} belongs to no family with a config.json")
    name, fields = writers[type(model_args)](model_args)
    head = "ForTokenClassification" if model_args.value_head else "ForCausalLM"
    config = {
        "architectures": [name + head],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": model_args.enable_weight_tying,
        "rope_theta": model_args.rope_theta,
        **_give(model_args, hf_config.COMMON),
        **fields,
    }
    if model_args.value_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    try:
        described = hf_config.from_hf_config(config).model_args
    except ValueError as error:
        raise ValueError(f"Hugging Face has no model with these args: {error}") from error
    if different := hf_config.differing(model_args, described):
        pairs = [f"{name} = {ours}, not {theirs}" for name, (ours, theirs) in different.items()]
        raise ValueError(
            f"Hugging Face's {config['model_type']} cannot have {', '.join(pairs)}; "
            "choose a flavor with values that it can have"
        )
    return config


# Our field -> the property that has its value, in families that compute it if it is None.
_COMPUTED = {
    "hidden_dim": "ffn_hidden_dim",
    "moe_inter_dim": "expert_hidden_dim",
    "head_dim": "attention_head_dim",
}


def _give(args: Any, table: Mapping[str, str], options: Iterable[str] = ()) -> dict[str, Any]:
    """Return HF field -> value, by a table HF field -> our field. options: fields of the same name."""
    fields = {}
    for hf, ours in (dict(table) | {name: name for name in options}).items():
        computed = _COMPUTED.get(ours, ours)
        value = operator.attrgetter(computed if hasattr(args, computed) else ours)(args)
        fields[hf] = args.n_heads if ours == "n_kv_heads" and value is None else value
    return fields


def _llama3(args: Any) -> tuple[str, dict[str, Any]]:
    fields = _give(args, hf_config.LLAMA, hf_config.LLAMA_OPTIONS)
    return "Llama", fields | {"model_type": "llama", "rope_scaling": _llama3_scaling(args)}


def _qwen3(args: Any) -> tuple[str, dict[str, Any]]:
    fields = _give(args, hf_config.LLAMA) | {
        "head_dim": args.head_dim,
        "attention_bias": False,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    if not args.moe_enabled:
        name, model_type = ("Qwen3", "qwen3") if args.qk_norm else ("Qwen2", "qwen2")
        return name, fields | {"model_type": model_type}
    fields |= _give(args, hf_config.QWEN_MOE)
    fields["num_experts"] = fields.pop("num_local_experts")
    return "Qwen3Moe", fields | {
        "model_type": "qwen3_moe",
        "norm_topk_prob": args.moe_args.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(args: Any) -> tuple[str, dict[str, Any]]:
    experts = args.moe_args
    is_v2 = experts.score_func == "softmax"
    has_groups = experts.num_expert_groups is not None
    method = ("group_limited_greedy" if has_groups else "greedy") if is_v2 else "noaux_tc"
    fields = _give(args, hf_config.DEEPSEEK)
    fields["n_routed_experts"] = fields.pop("num_local_experts")
    fields |= {
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": experts.score_func,
        "topk_method": method,
        "norm_topk_prob": experts.route_norm,
        "n_group": experts.num_expert_groups or 1,
        "topk_group": experts.num_limited_groups or 1,
        "rope_scaling": _yarn(args, args.beta_fast, args.beta_slow),
    }
    if fields["rope_scaling"]:
        fields["rope_scaling"] |= {"mscale": args.mscale, "mscale_all_dim": args.mscale}
    return "DeepseekV2" if is_v2 else "DeepseekV3", fields


def _llama4(args: Any) -> tuple[str, dict[str, Any]]:
    return "Llama4", _give(args, hf_config.LLAMA4, hf_config.LLAMA4_OPTIONS) | {
        "model_type": "llama4_text",
        "no_rope_layers": [int(not args.is_nope_layer(n)) for n in range(args.n_layers)],
        "rope_scaling": _llama3_scaling(args),
    }


def _gpt_oss(args: Any) -> tuple[str, dict[str, Any]]:
    yarn = _yarn(args, args.ntk_beta, args.ntk_alpha)
    return "GptOss", _give(args, hf_config.GPT_OSS) | {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "swiglu_limit": args.swiglu_limit,
        "rope_scaling": yarn and yarn | {"truncate": False},
    }


_WRITERS: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {
    "llama3": _llama3,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "llama4": _llama4,
    "gpt_oss": _gpt_oss,
}


def _llama3_scaling(args: Any) -> dict[str, Any] | None:
    if args.rope_scaling_args is None:
        return None
    return {"rope_type": "llama3"} | _give(args.rope_scaling_args, hf_config.LLAMA3_SCALING)


def _yarn(args: Any, beta_fast: float, beta_slow: float) -> dict[str, Any] | None:
    if args.rope_factor == 1:
        return None
    betas = {"beta_fast": beta_fast, "beta_slow": beta_slow}
    return {"rope_type": "yarn"} | _give(args, hf_config.YARN) | betas
