"""For each model_type of Hugging Face (HF), a table that pairs fields of config.json with our args."""

import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torchtitan.models.rope import RoPEScalingArgs

Config = Mapping[str, Any]

# Property that is compared -> the fields that it is computed from, which are not compared.
DERIVED = {
    "ffn_hidden_dim": ["hidden_dim", "multiple_of", "ffn_dim_multiplier"],
    "expert_hidden_dim": ["moe_inter_dim", "auto_scale_hidden_dim"],
    "attention_head_dim": ["head_dim"],
}
# Our field that may be None -> the property that then computes the value.
_COMPUTED = {fields[0]: derived for derived, fields in DERIVED.items()}

MOE = "moe_args."  # prefix of the fields of MoEArgs

# Allowed values: a range of integers, one of the types float, bool and str, or None for any value.
# Larger sizes must be mistakes; they are refused before memory is allocated.
_Kind = range | type | None
_SIZE, _COUNT = range(1, 2**24 + 1), range(2**24 + 1)
_REQUIRED = object()


class _Field(NamedTuple):
    """A field of HF's config, and the field of our args with the same value.

    default: the value if a config lacks the field, or a function from the config to that value.
    """

    hf: str
    ours: str
    kind: _Kind = _SIZE
    default: Any = _REQUIRED


class ModelType(NamedTuple):
    """A model_type of Hugging Face.

    family: our family. name: prefix of HF's class names. fields: in addition to `ALL_TYPES`.
    read: function from a config to our field -> value, for fields that need more than a table.
    write: the inverse, from our args to HF field -> value.
    fixed: HF field -> (the only value that our model supports, the reason).
    args: our field -> value in all models of this type. rope_theta: default if a config lacks it.
    """

    family: str
    name: str
    fields: tuple[_Field, ...]
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, str]] = {}
    args: Mapping[str, Any] = {}
    rope_theta: float = 10000.0


def _is_v2(config: Config) -> bool:
    return config["model_type"] == "deepseek_v2"


def _head_dim(config: Config) -> int:
    is_qwen2 = config["model_type"] == "qwen2"
    return config["hidden_size"] // config["num_attention_heads"] if is_qwen2 else 128


ALL_TYPES = (
    _Field("hidden_size", "dim"),
    _Field("num_hidden_layers", "n_layers", range(1, 1001)),
    _Field("num_attention_heads", "n_heads"),
    _Field("vocab_size", "vocab_size"),
    _Field("rms_norm_eps", "norm_eps", float),
    _Field("max_position_embeddings", "max_seq_len", range(1, 2**31)),
    _Field("tie_word_embeddings", "enable_weight_tying", bool, False),
)
_KV_HEADS = _Field("num_key_value_heads", "n_kv_heads", default=lambda c: c["num_attention_heads"])
_TOP_K = _Field("num_experts_per_tok", "moe_args.top_k")
_LLAMA = (_KV_HEADS, _Field("intermediate_size", "hidden_dim"))
_LLAMA_BLOCK = (
    _Field("head_dim", "head_dim", default=None),
    _Field("attention_bias", "attention_bias", bool, False),
    _Field("mlp_bias", "mlp_bias", bool, False),
)
_QWEN_BLOCK = (*_LLAMA, _Field("head_dim", "head_dim", default=_head_dim))
_QWEN3_MOE_FIELDS = (
    _Field("num_experts", "moe_args.num_experts"),
    _TOP_K,
    _Field("moe_intermediate_size", "moe_inter_dim"),
    _Field("norm_topk_prob", "moe_args.route_norm", bool, False),
)
_DEEPSEEK = (
    _Field("n_routed_experts", "moe_args.num_experts"),
    _TOP_K,
    _Field("intermediate_size", "inter_dim"),
    _Field("moe_intermediate_size", "moe_inter_dim"),
    _Field("first_k_dense_replace", "n_dense_layers", _COUNT),
    _Field("kv_lora_rank", "kv_lora_rank"),
    _Field("q_lora_rank", "q_lora_rank", _COUNT, 0),
    _Field("qk_nope_head_dim", "qk_nope_head_dim"),
    _Field("qk_rope_head_dim", "qk_rope_head_dim"),
    _Field("v_head_dim", "v_head_dim"),
    _Field("n_shared_experts", "moe_args.num_shared_experts", _COUNT),
    _Field("routed_scaling_factor", "moe_args.route_scale", float),
    _Field("norm_topk_prob", "moe_args.route_norm", bool, lambda c: not _is_v2(c)),
    _Field(
        "scoring_func", "moe_args.score_func", str, lambda c: "softmax" if _is_v2(c) else "sigmoid"
    ),
)
_GROUPS = (
    _Field("n_group", "moe_args.num_expert_groups"),
    _Field("topk_group", "moe_args.num_limited_groups", default=None),
)


_LLAMA4 = (
    _Field("intermediate_size_mlp", "hidden_dim"),
    _Field("attention_chunk_size", "fixed_attn_block_size"),
    _Field("interleave_moe_layer_step", "interleave_moe_layer_step", default=1),
    _Field("use_qk_norm", "use_qk_norm", bool, True),
    _Field("attn_temperature_tuning", "attn_temperature_tuning", None, True),
    _Field("floor_scale", "floor_scale", float, 8192),
    _Field("attn_scale", "attn_scale", float, 0.1),
    _Field("attention_bias", "attention_bias", bool, False),
)
_NO_ROPE_INTERVAL = _Field("no_rope_layer_interval", "every_n_layers_nope", default=4)
_GPT_OSS = (
    _Field("sliding_window", "sliding_window_size", _COUNT),
    _Field("swiglu_limit", "swiglu_limit", float, 7.0),
)
_HEADS_AND_EXPERTS = (
    _KV_HEADS,
    _Field("num_local_experts", "moe_args.num_experts"),
    _TOP_K,
    _Field("head_dim", "head_dim"),
    _Field("intermediate_size", "moe_inter_dim"),
)
_LLAMA3_ROPE = (
    _Field("factor", "scaling_factor", float),
    _Field("low_freq_factor", "low_freq_factor", float),
    _Field("high_freq_factor", "high_freq_factor", float),
    _Field("original_max_position_embeddings", "original_max_position_embeddings"),
)
_YARN = (
    _Field("factor", "rope_factor", float),
    _Field("original_max_position_embeddings", "original_seq_len"),
)
_DEEPSEEK_YARN = (
    *_YARN,
    _Field("beta_fast", "beta_fast", float, 32),
    _Field("beta_slow", "beta_slow", float, 1),
    _Field("mscale", "mscale", float),
    _Field("mscale_all_dim", "mscale", float),
)
_GPT_OSS_YARN = (
    *_YARN,
    _Field("beta_fast", "ntk_beta", float, 32),
    _Field("beta_slow", "ntk_alpha", float, 1),
)

_SILU = {"hidden_act": ("silu", "feed-forwards are gated by SiLU")}
_PLAIN_QWEN = {"rope_scaling": None, "sliding_window": None}
_QWEN = _SILU | {"use_sliding_window": (False, "qwen models have no sliding windows here")}
_QWEN3 = _QWEN | {"attention_bias": (False, "Qwen 3 blocks have no biases")}
_QWEN3_MOE = _QWEN3 | {
    "decoder_sparse_step": (1, "every layer has experts"),
    "mlp_only_layers": ([], "every layer has experts"),
}
_DEEPSEEK_FIXED = _SILU | {
    "attention_bias": (False, "its projections have no biases"),
    "rope_interleave": (True, "pairs that turn together must be neighbours"),
    "moe_layer_freq": (1, "every layer above the dense ones has experts"),
}
_GPT_OSS_FIXED = _SILU | {
    "attention_bias": (True, "its projections have biases"),
    "swiglu_alpha": (1.702, "the activation's slope is fixed"),
}
_SOFTMAX_ROUTER = {"moe_args.score_func": "softmax", "moe_args.score_before_experts": False}
_SIGMOID_ROUTER = _SOFTMAX_ROUTER | {"moe_args.score_func": "sigmoid"}
_SOFTMAX_EXPERTS = _SOFTMAX_ROUTER | {"moe_args.num_shared_experts": 0}


def _read_qwen(config: Config) -> dict[str, Any]:
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise refusal(config, "layer_types", "qwen models have no sliding windows here")
    _rope(config, None)
    return {}


def _read_deepseek(config: Config) -> dict[str, Any]:
    methods = ["greedy", "group_limited_greedy"] if _is_v2(config) else ["noaux_tc"]
    method = config.get("topk_method", methods[0])
    require(config, "topk_method", methods, f"{config['model_type']} routes otherwise")
    is_grouped = method != "greedy" and config.get("n_group") not in (None, 1)
    values = take(config, _GROUPS) if is_grouped else {field.ours: None for field in _GROUPS}
    rope = _rope(config, "yarn")
    # If mscale and mscale_all_dim differ, HF also scales cos and sin; our model scales only the softmax.
    if rope and (not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim")):
        raise refusal(rope, "mscale", "it must be given and equal mscale_all_dim")
    return values | _read_yarn(rope, _DEEPSEEK_YARN, truncate=True)


def _write_deepseek(args: Any) -> dict[str, Any]:
    experts = args.moe_args
    method = "noaux_tc"
    if experts.score_func == "softmax":  # V2
        method = "greedy" if experts.num_expert_groups is None else "group_limited_greedy"
    return {
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "topk_method": method,
        "n_group": experts.num_expert_groups or 1,
        "topk_group": experts.num_limited_groups or 1,
        "rope_scaling": _write_yarn(args, _DEEPSEEK_YARN),
    }


def _read_llama4(config: Config) -> dict[str, Any]:
    n_layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step", 1)
    _require_layers(config, "moe_layers", list(range(step - 1, n_layers, step)))
    # 1 for a layer with RoPE, else 0.
    has_rope = config.get("no_rope_layers")
    if not has_rope:
        interval = take(config, [_NO_ROPE_INTERVAL])["every_n_layers_nope"]
        has_rope = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    interval = has_rope.index(0) + 1 if 0 in has_rope else None
    expected = [int(interval is None or (n + 1) % interval != 0) for n in range(n_layers)]
    if list(has_rope) != expected:
        raise refusal(config, "no_rope_layers", "layers without RoPE must be evenly spaced")
    kinds = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    _require_layers(config, "layer_types", kinds)
    is_tuned = bool(config.get("attn_temperature_tuning", True))
    layers = {"every_n_layers_nope": interval, "attn_temperature_tuning": is_tuned}
    return layers | _read_llama3_rope(config)


def _write_llama4(args: Any) -> dict[str, Any]:
    layers = [int(not args.is_nope_layer(n)) for n in range(args.n_layers)]
    return {"no_rope_layers": layers} | _write_llama3_rope(args)


def _read_gpt_oss(config: Config) -> dict[str, Any]:
    n_layers = config["num_hidden_layers"]
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(n_layers)]
    _require_layers(config, "layer_types", kinds)
    return _read_yarn(_rope(config, "yarn"), _GPT_OSS_YARN, truncate=False)


def _write_gpt_oss(args: Any) -> dict[str, Any]:
    rope = _write_yarn(args, _GPT_OSS_YARN)
    return {"rope_scaling": rope and rope | {"truncate": False}}


def _read_llama3_rope(config: Config) -> dict[str, Any]:
    rope = _rope(config, "llama3")
    return {"rope_scaling_args": rope and RoPEScalingArgs(**take(rope, _LLAMA3_ROPE))}


def _write_llama3_rope(args: Any) -> dict[str, Any]:
    scaling = args.rope_scaling_args
    if scaling is not None:  # transformers warns of as many or more positions than the model's
        scaling = scaling.shortened(args.max_seq_len)
    return {"rope_scaling": scaling and {"rope_type": "llama3"} | give(scaling, _LLAMA3_ROPE)}


def _read_yarn(rope: Config | None, fields: Iterable[_Field], truncate: bool) -> dict[str, Any]:
    if rope is None:
        return {"rope_factor": 1.0}
    if rope.get("truncate", True) is not truncate:
        raise refusal(rope, "truncate", f"this family blends frequencies with {truncate}")
    if rope.get("attention_factor") is not None:
        raise refusal(rope, "attention_factor", "our models compute it from factor")
    return take(rope, fields)


def _write_yarn(args: Any, fields: Iterable[_Field]) -> dict[str, Any] | None:
    return None if args.rope_factor == 1 else {"rope_type": "yarn"} | give(args, fields)


TYPES = {
    "llama": ModelType(
        *("llama3", "Llama", _LLAMA + _LLAMA_BLOCK, _read_llama3_rope, _write_llama3_rope),
        fixed=_SILU,
    ),
    "qwen2": ModelType(
        *("qwen3", "Qwen2", _QWEN_BLOCK, _read_qwen, lambda _: _PLAIN_QWEN, _QWEN),
        args={"qk_norm": False, "qkv_bias": True, "moe_enabled": False},
    ),
    "qwen3": ModelType(
        *("qwen3", "Qwen3", _QWEN_BLOCK, _read_qwen, lambda _: _PLAIN_QWEN, _QWEN3),
        args={"qk_norm": True, "qkv_bias": False, "moe_enabled": False},
    ),
    "qwen3_moe": ModelType(
        *("qwen3", "Qwen3Moe", _QWEN_BLOCK + _QWEN3_MOE_FIELDS, _read_qwen, lambda _: _PLAIN_QWEN),
        fixed=_QWEN3_MOE,
        args=_SOFTMAX_EXPERTS | {"qk_norm": True, "qkv_bias": False, "moe_enabled": True},
    ),
    "deepseek_v2": ModelType(
        *("deepseek_v3", "DeepseekV2", _DEEPSEEK, _read_deepseek, _write_deepseek, _DEEPSEEK_FIXED),
        args=_SOFTMAX_ROUTER | {"moe_args.group_score": "max"},
    ),
    "deepseek_v3": ModelType(
        *("deepseek_v3", "DeepseekV3", _DEEPSEEK, _read_deepseek, _write_deepseek, _DEEPSEEK_FIXED),
        args=_SIGMOID_ROUTER | {"moe_args.group_score": "top2_sum"},
    ),
    "llama4_text": ModelType(
        *("llama4", "Llama4", _HEADS_AND_EXPERTS + _LLAMA4, _read_llama4, _write_llama4, _SILU),
        args={"moe_args.num_shared_experts": 1, "moe_args.score_func": "sigmoid"},
        rope_theta=500000.0,
    ),
    "gpt_oss": ModelType(
        *("gpt_oss", "GptOss", _HEADS_AND_EXPERTS + _GPT_OSS, _read_gpt_oss, _write_gpt_oss),
        fixed=_GPT_OSS_FIXED,
        args=_SOFTMAX_EXPERTS | {"moe_args.route_norm": True, "moe_args.gate_bias": True},
        rope_theta=150000.0,
    ),
}


_SAME_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


def take(config: Config, fields: Iterable[_Field]) -> dict[str, Any]:
    """Return our field -> value from a config. Raises ValueError for missing or impossible values."""
    values, missing = {}, []
    for field in fields:
        names = _SAME_FIELDS if field.hf in _SAME_FIELDS else (field.hf,)
        name = next((name for name in names if config.get(name) is not None), None)
        if name is not None:
            check_kind(config, name, field.kind)
            values[field.ours] = config[name]
        elif field.default is _REQUIRED:
            missing.append(field.hf)
        elif not missing:
            values[field.ours] = field.default(config) if callable(field.default) else field.default
    if missing:
        raise ValueError(f"The Hugging Face config lacks {', '.join(missing)}; add them")
    return values


def give(args: Any, fields: Iterable[_Field]) -> dict[str, Any]:
    """Return HF field -> value: the inverse of `take`."""
    config = {}
    for field in fields:
        computed = _COMPUTED.get(field.ours, field.ours)
        value = operator.attrgetter(computed if hasattr(args, computed) else field.ours)(args)
        config[field.hf] = args.n_heads if field is _KV_HEADS and value is None else value
    return config


def _rope(config: Config, name: str | None) -> Config | None:
    """Return the RoPE scaling table; None if unscaled. Raises ValueError unless its type is `name`."""
    rope = config["rope_parameters"]
    require(rope, "rope_type", {"default", name}, "frequencies cannot be scaled that way")
    return None if rope["rope_type"] == "default" else rope


def rope_table(config: Config) -> dict[str, Any]:
    """Return rope_parameters from either spelling; ValueError if a config has both and they differ.

    transformers 5 reads rope_scaling and then ignores rope_theta; transformers 4 reads only rope_scaling.
    """
    theta = config.get("rope_theta")
    if theta is not None:
        check_kind(config, "rope_theta", float)
    spellings = {}
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise refusal(config, name, "it must be a table")
        if config.get(name):
            rope = spellings[name] = dict(config[name])
            rope.setdefault("rope_type", rope.pop("type", "default"))
            rope.pop("type", None)
            if theta is not None:
                rope.setdefault("rope_theta", theta)
    first = next(iter(spellings.values()), {"rope_type": "default", "rope_theta": theta})
    if any(rope != first for rope in spellings.values()):
        raise refusal(
            config,
            "rope_scaling",
            "rope_parameters says otherwise; keep rope_parameters and remove rope_scaling",
        )
    if theta is not None and first.get("rope_theta") != theta:
        raise refusal(config, "rope_theta", f"the RoPE table has {first['rope_theta']}")
    for table in (first, config):
        require(table, "partial_rotary_factor", [1], "whole heads are rotated")
    return {name: value for name, value in first.items() if value is not None}


def check_kind(config: Config, name: str, kind: _Kind) -> None:
    value = config[name]
    if isinstance(kind, range):
        rule = f"it must be an integer from {kind[0]} to {kind[-1]}"
        is_right = type(value) is int and value in kind
    elif kind is float:
        rule = "it must be a number, not negative and below 1e12"
        is_right = type(value) in (int, float) and 0 <= value < 1e12
    else:
        rule = "it must be true or false" if kind is bool else "it must be text"
        is_right = kind is None or type(value) is kind
    if not is_right:
        raise refusal(config, name, rule)


def require(config: Config, name: str, allowed: Collection[Any], reason: str) -> None:
    if config.get(name) is not None and config[name] not in allowed:
        raise refusal(config, name, reason)


def _require_layers(config: Config, name: str, expected: list[Any]) -> None:
    """Raise ValueError if the config has this list of layers and it is not `expected`."""
    if config.get(name) is not None and list(config[name]) != expected:
        raise refusal(config, name, f"the layers must be {expected}")


def refusal(config: Config, name: str, reason: str) -> ValueError:
    return ValueError(
        f"No model here matches the Hugging Face config: it has {name} = "
        f"{reprlib.repr(config.get(name))}, but {reason}"
    )
