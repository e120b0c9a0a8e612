"""Finds the model that a Hugging Face (HF) config.json describes, and writes the config.json of a model.

    python -m torchtitan.models.hf_config path/to/config.json

`_TYPES` has a row for each model_type, which is read in both directions. What a family cannot express
is refused. What is written has the spelling of transformers 4 (rope_theta, rope_scaling), which
transformers 5 and vLLM also read.
"""

import argparse
import dataclasses
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torchtitan.models.args import DecoderArgs
from torchtitan.models.rope import RoPEScalingArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.files import read_json_object

Config = Mapping[str, Any]


class HFMatch(NamedTuple):
    """The model that a config.json describes; `flavor` is None if no flavor has the same numbers."""

    family: str
    flavor: str | None
    model_args: DecoderArgs


def from_hf_config(config: Config | str | os.PathLike[str]) -> HFMatch:
    """Return the family, the flavor if one has the same numbers, and new args with all of them.

    config: the content of a config.json, its path, or the path of its folder. Both spellings are
        read: rope_theta and rope_scaling, or the rope_parameters of transformers 5.
    The comparison with flavors ignores max_seq_len, the end-of-text token and the attention kernel,
    which training sets. A classifier with one label is a model with a value head; only its body is
    compared.
    Raises ValueError, with the field and the reason, for a config that the family cannot express,
    and for numbers that no model can have.
    """
    if not isinstance(config, Mapping):
        path = os.path.join(config, "config.json") if os.path.isdir(config) else config
        try:
            content = read_json_object(path)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read: {error.strerror}; give the config.json of a model, or its folder"
            ) from error
        try:
            return from_hf_config(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    config = _same_spelling(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        raise _refusal(config, "model_type", f"known are {', '.join(_TYPES)}")
    row = _TYPES[model_type]
    family, flavors = row.family, get_train_spec(row.family).model_args
    args_cls = type(next(iter(flavors.values())))
    try:
        for name, (value, reason) in row.fixed.items():
            _require(config, name, [value], reason)
        eos = config.get("eos_token_id")
        values = {
            "rope_theta": config["rope_parameters"].get("rope_theta", row.rope_theta),
            "enable_weight_tying": config.get("tie_word_embeddings", False),
            "eos_id": eos[0] if isinstance(eos, list) else eos,
            "value_head": _has_value_head(config),
            **row.args,
            **_take(config, row.fields, row.defaults),
            **row.read(config),
        }
        if values["eos_id"] is None:
            del values["eos_id"]
        experts = {k.removeprefix(_MOE): v for k, v in values.items() if k.startswith(_MOE)}
        model_args = args_cls(**{k: v for k, v in values.items() if not k.startswith(_MOE)})
        if experts:
            model_args.moe_args = dataclasses.replace(model_args.moe_args, **experts)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"A field of the Hugging Face config is missing or has the wrong type "
            f"({type(error).__name__}: {error}); give the config.json of a model"
        ) from error
    n_kv_heads = getattr(model_args, "n_kv_heads", None)
    if n_kv_heads and model_args.n_heads % n_kv_heads:
        raise _refusal(
            config, "num_key_value_heads", f"it must divide the {model_args.n_heads} query heads"
        )
    same = [name for name, args in flavors.items() if not differing(args, model_args)]
    return HFMatch(family, same[0] if same else None, model_args)


def to_hf_config(model_args: Any) -> dict[str, Any]:
    """Return the content of a config.json that describes a model with these args.

    It has no token ids and no dtype, because the args don't have them.
    Raises ValueError if Hugging Face has no model with these args.
    """

    def n_other(row: _ModelType) -> int:
        return sum(operator.attrgetter(name)(model_args) != x for name, x in row.args.items())

    rows = {
        model_type: row
        for model_type, row in _TYPES.items()
        if type(model_args) is type(next(iter(get_train_spec(row.family).model_args.values())))
    }
    if not rows:
        raise ValueError(f"{type(model_args).__name__} belongs to no family with a config.json")
    model_type = min(rows, key=lambda name: n_other(rows[name]))
    row = rows[model_type]
    head = "ForTokenClassification" if model_args.value_head else "ForCausalLM"
    config = {
        "architectures": [row.name + head],
        "model_type": model_type,
        "initializer_range": 0.02,
        "tie_word_embeddings": model_args.enable_weight_tying,
        "rope_theta": model_args.rope_theta,
        **{name: value for name, (value, _) in row.fixed.items()},
        **_give(model_args, row.fields),
        **row.write(model_args),
    }
    config = {row.spelling.get(name, name): value for name, value in config.items()}
    if model_args.value_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    try:
        described = from_hf_config(config).model_args
    except ValueError as error:
        raise ValueError(f"Hugging Face has no model with these args: {error}") from error
    if different := differing(model_args, described):
        pairs = [f"{name} = {ours}, not {theirs}" for name, (ours, theirs) in different.items()]
        raise ValueError(
            f"Hugging Face's {model_type} cannot have {', '.join(pairs)}; choose a flavor with "
            "values that it can have"
        )
    return config


def differing(a: DecoderArgs, b: DecoderArgs) -> dict[str, tuple[Any, Any]]:
    """Return name -> (a's, b's) for different values that change which weights fit, or the result."""
    facts_a, facts_b = facts_of(a), facts_of(b)
    pairs = {name: (facts_a.get(name), facts_b.get(name)) for name in facts_a | facts_b}
    if a.value_head or b.value_head:
        del pairs["enable_weight_tying"]  # a model with a value head has no output to tie
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def names_of_choices(table: Mapping[str, Any]) -> set[str]:
    """Return the names by which `differing` knows the fields that a table of model args sets."""
    names = set(table)
    for name, value in table.items():
        if isinstance(value, Mapping):
            names |= {f"{name}.{field}" for field in value}
    return names | {derived for derived, fields in _DERIVED.items() if names & {*fields}}


# HF field -> our field, in one table per group of families.

_MOE = "moe_args."  # prefix of the fields of MoEArgs

_COMMON = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
}
_GROUPED_HEADS = {"num_key_value_heads": "n_kv_heads"}
_LLAMA = _COMMON | _GROUPED_HEADS | {"intermediate_size": "hidden_dim"}
_EXPERTS = {
    "num_local_experts": "moe_args.num_experts",
    "num_experts_per_tok": "moe_args.top_k",
}
_QWEN_MOE = _LLAMA | _EXPERTS | {"moe_intermediate_size": "moe_inter_dim"}
_DEEPSEEK = (
    _COMMON
    | _EXPERTS
    | {
        "intermediate_size": "inter_dim",
        "moe_intermediate_size": "moe_inter_dim",
        "first_k_dense_replace": "n_dense_layers",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "n_shared_experts": "moe_args.num_shared_experts",
        "routed_scaling_factor": "moe_args.route_scale",
    }
)
_WIDE_EXPERTS = (
    _COMMON
    | _GROUPED_HEADS
    | _EXPERTS
    | {"head_dim": "head_dim", "intermediate_size": "moe_inter_dim"}
)
_LLAMA4 = _WIDE_EXPERTS | {
    "intermediate_size_mlp": "hidden_dim",
    "attention_chunk_size": "fixed_attn_block_size",
}
_GPT_OSS = _WIDE_EXPERTS | {"sliding_window": "sliding_window_size"}
_LLAMA3_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_YARN = {"factor": "rope_factor", "original_max_position_embeddings": "original_seq_len"}

# Larger sizes must be mistakes, and are refused before anything is allocated.
_LARGEST_SIZE = 2**24
_LARGEST = {"num_hidden_layers": 1000, "max_position_embeddings": 2**31 - 1}
_MAY_BE_ZERO = {"first_k_dense_replace", "n_shared_experts", "sliding_window", "q_lora_rank"}
_SIZES = {
    *(_QWEN_MOE | _DEEPSEEK | _LLAMA4 | _GPT_OSS),
    "q_lora_rank",
    "interleave_moe_layer_step",
    "no_rope_layer_interval",
    "n_group",
    "topk_group",
    "original_max_position_embeddings",
} - {"rms_norm_eps", "routed_scaling_factor"}
_FRACTIONS = set(
    "rms_norm_eps routed_scaling_factor rope_theta factor low_freq_factor high_freq_factor "
    "beta_fast beta_slow mscale mscale_all_dim floor_scale attn_scale swiglu_limit".split()
)
_SWITCHES = {"attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_qk_norm"}

_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")  # ends of class names

_SAME_FIELD = {  # other HF names of a field -> its name in the tables
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
}


# Our field -> the property that has its value, in families that compute it if it is None.
_COMPUTED = {
    "hidden_dim": "ffn_hidden_dim",
    "moe_inter_dim": "expert_hidden_dim",
    "head_dim": "attention_head_dim",
}


class _ModelType(NamedTuple):
    """A model_type of Hugging Face, by the tables and functions that read and write its config.

    family: ours. name: how the names of its classes begin. fields: HF field -> our field.
    read, write: return what needs more than tables: our field -> value, HF field -> value.
    defaults: HF field -> value if a config lacks it. fixed: HF field -> (the only value that our model
        computes, the reason). args: our field -> value in all models of this type.
    rope_theta: of configs without one. spelling: field in `fields` -> its name in configs.
    """

    family: str
    name: str
    fields: Mapping[str, str]
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    defaults: Mapping[str, Any] = {}
    fixed: Mapping[str, tuple[Any, str]] = {}
    args: Mapping[str, Any] = {}
    rope_theta: float = 10000.0
    spelling: Mapping[str, str] = {}


def _read_qwen(config: Config) -> dict[str, Any]:
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise _refusal(config, "layer_types", "qwen models have no sliding windows here")
    _require_rope_type(config, {"default"})
    is_qwen2 = config["model_type"] == "qwen2"
    head_dim = config["hidden_size"] // config["num_attention_heads"] if is_qwen2 else 128
    return {"head_dim": config.get("head_dim") or head_dim}


def _write_qwen(args: Any) -> dict[str, Any]:
    return {"head_dim": args.head_dim, "rope_scaling": None, "sliding_window": None}


def _read_deepseek(config: Config) -> dict[str, Any]:
    is_v2 = config["model_type"] == "deepseek_v2"
    methods = ["greedy", "group_limited_greedy"] if is_v2 else ["noaux_tc"]
    method = config.get("topk_method", methods[0])
    _require(config, "topk_method", methods, f"{config['model_type']} routes otherwise")
    n_groups = config.get("n_group")
    is_grouped = method != "greedy" and n_groups not in (None, 1)
    args = {
        "moe_args.num_expert_groups": n_groups if is_grouped else None,
        "moe_args.num_limited_groups": config.get("topk_group") if is_grouped else None,
    }
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        # If the two differ, HF also scales cos and sin; our model scales only the softmax.
        if not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim"):
            raise _refusal(rope, "mscale", "it must be given and equal mscale_all_dim")
        args["mscale"] = rope["mscale"]
    return args | _read_yarn(config, truncate=True, betas=("beta_fast", "beta_slow"))


def _write_deepseek(args: Any) -> dict[str, Any]:
    experts = args.moe_args
    has_groups, is_v2 = experts.num_expert_groups is not None, experts.score_func == "softmax"
    method = ("group_limited_greedy" if has_groups else "greedy") if is_v2 else "noaux_tc"
    rope = _write_yarn(args, args.beta_fast, args.beta_slow)
    return {
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "topk_method": method,
        "n_group": experts.num_expert_groups or 1,
        "topk_group": experts.num_limited_groups or 1,
        "rope_scaling": rope and rope | {"mscale": args.mscale, "mscale_all_dim": args.mscale},
    }


def _read_llama4(config: Config) -> dict[str, Any]:
    n_layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step", 1)
    if config.get("moe_layers") is not None:
        _require_layers(config, "moe_layers", list(range(step - 1, n_layers, step)))
    # 1 for a layer with RoPE, else 0.
    has_rope = config.get("no_rope_layers") or [
        int((layer + 1) % config.get("no_rope_layer_interval", 4) != 0) for layer in range(n_layers)
    ]
    interval = has_rope.index(0) + 1 if 0 in has_rope else None
    expected = [int(interval is None or (n + 1) % interval != 0) for n in range(n_layers)]
    if list(has_rope) != expected:
        raise _refusal(config, "no_rope_layers", "layers without RoPE must be evenly spaced")
    if config.get("layer_types"):
        kinds = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
        _require_layers(config, "layer_types", kinds)
    is_tuned = bool(config.get("attn_temperature_tuning", True))
    return _read_llama3_rope(config) | {
        "every_n_layers_nope": interval,
        "attn_temperature_tuning": is_tuned,
    }


def _write_llama4(args: Any) -> dict[str, Any]:
    layers = [int(not args.is_nope_layer(n)) for n in range(args.n_layers)]
    return {"no_rope_layers": layers} | _write_llama3_rope(args)


def _read_gpt_oss(config: Config) -> dict[str, Any]:
    if config.get("layer_types"):
        n_layers = config["num_hidden_layers"]
        kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(n_layers)]
        _require_layers(config, "layer_types", kinds)
    return _read_yarn(config, truncate=False, betas=("ntk_beta", "ntk_alpha"))


def _write_gpt_oss(args: Any) -> dict[str, Any]:
    yarn = _write_yarn(args, args.ntk_beta, args.ntk_alpha)
    return {"rope_scaling": yarn and yarn | {"truncate": False}}


def _read_llama3_rope(config: Config) -> dict[str, Any]:
    if _require_rope_type(config, {"default", "llama3"}) == "default":
        return {"rope_scaling_args": None}
    scaling = _take(config["rope_parameters"], _LLAMA3_SCALING)
    return {"rope_scaling_args": RoPEScalingArgs(**scaling)}


def _write_llama3_rope(args: Any) -> dict[str, Any]:
    scaling = args.rope_scaling_args
    return {"rope_scaling": scaling and {"rope_type": "llama3"} | _give(scaling, _LLAMA3_SCALING)}


def _read_yarn(config: Config, truncate: bool, betas: tuple[str, str]) -> dict[str, Any]:
    """betas: our names of beta_fast and beta_slow."""
    if _require_rope_type(config, {"default", "yarn"}) == "default":
        return {"rope_factor": 1.0}
    rope = config["rope_parameters"]
    if rope.get("truncate", True) is not truncate:
        raise _refusal(rope, "truncate", f"this family blends frequencies with {truncate}")
    if rope.get("attention_factor") is not None:
        raise _refusal(rope, "attention_factor", "our models compute it from factor")
    fast, slow = betas
    return _take(rope, _YARN) | {fast: rope.get("beta_fast", 32), slow: rope.get("beta_slow", 1)}


def _write_yarn(args: Any, beta_fast: float, beta_slow: float) -> dict[str, Any] | None:
    if args.rope_factor == 1:
        return None
    betas = {"beta_fast": beta_fast, "beta_slow": beta_slow}
    return {"rope_type": "yarn"} | _give(args, _YARN) | betas


def _same_names(defaults: Mapping[str, Any]) -> dict[str, str]:
    return {name: name for name in defaults}


_SILU = {"hidden_act": ("silu", "feed-forwards are gated by SiLU")}
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
_ROUTING = {"norm_topk_prob": "moe_args.route_norm"}
_LATENTS = {"q_lora_rank": "q_lora_rank", "scoring_func": "moe_args.score_func"}
_LLAMA_DEFAULTS = {"head_dim": None, "attention_bias": False, "mlp_bias": False}
_LLAMA4_DEFAULTS = {
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
}
_SOFTMAX_ROUTER = {"moe_args.score_func": "softmax", "moe_args.score_before_experts": False}
_SIGMOID_ROUTER = _SOFTMAX_ROUTER | {"moe_args.score_func": "sigmoid"}
_SOFTMAX_EXPERTS = _SOFTMAX_ROUTER | {"moe_args.num_shared_experts": 0}

_TYPES = {
    "llama": _ModelType(
        *("llama3", "Llama", _LLAMA | _same_names(_LLAMA_DEFAULTS)),
        *(_read_llama3_rope, _write_llama3_rope, _LLAMA_DEFAULTS, _SILU),
    ),
    "qwen2": _ModelType(
        *("qwen3", "Qwen2", _LLAMA, _read_qwen, _write_qwen),
        fixed=_QWEN,
        args={"qk_norm": False, "qkv_bias": True, "moe_enabled": False},
    ),
    "qwen3": _ModelType(
        *("qwen3", "Qwen3", _LLAMA, _read_qwen, _write_qwen),
        fixed=_QWEN3,
        args={"qk_norm": True, "qkv_bias": False, "moe_enabled": False},
    ),
    "qwen3_moe": _ModelType(
        *("qwen3", "Qwen3Moe", _QWEN_MOE | _ROUTING, _read_qwen, _write_qwen),
        defaults={"norm_topk_prob": False},
        fixed=_QWEN3_MOE,
        args=_SOFTMAX_EXPERTS | {"qk_norm": True, "qkv_bias": False, "moe_enabled": True},
        spelling={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": _ModelType(
        *("deepseek_v3", "DeepseekV2", _DEEPSEEK | _ROUTING | _LATENTS),
        *(_read_deepseek, _write_deepseek),
        defaults={"q_lora_rank": 0, "scoring_func": "softmax", "norm_topk_prob": False},
        fixed=_DEEPSEEK_FIXED,
        args=_SOFTMAX_ROUTER | {"moe_args.group_score": "max"},
        spelling={"num_local_experts": "n_routed_experts"},
    ),
    "deepseek_v3": _ModelType(
        *("deepseek_v3", "DeepseekV3", _DEEPSEEK | _ROUTING | _LATENTS),
        *(_read_deepseek, _write_deepseek),
        defaults={"q_lora_rank": 0, "scoring_func": "sigmoid", "norm_topk_prob": True},
        fixed=_DEEPSEEK_FIXED,
        args=_SIGMOID_ROUTER | {"moe_args.group_score": "top2_sum"},
        spelling={"num_local_experts": "n_routed_experts"},
    ),
    "llama4_text": _ModelType(
        *("llama4", "Llama4", _LLAMA4 | _same_names(_LLAMA4_DEFAULTS)),
        *(_read_llama4, _write_llama4, _LLAMA4_DEFAULTS, _SILU),
        args={"moe_args.num_shared_experts": 1, "moe_args.score_func": "sigmoid"},
        rope_theta=500000.0,
    ),
    "gpt_oss": _ModelType(
        *("gpt_oss", "GptOss", _GPT_OSS | {"swiglu_limit": "swiglu_limit"}),
        *(_read_gpt_oss, _write_gpt_oss),
        defaults={"swiglu_limit": 7.0},
        fixed=_GPT_OSS_FIXED,
        args=_SOFTMAX_EXPERTS | {"moe_args.route_norm": True, "moe_args.gate_bias": True},
        rope_theta=150000.0,
    ),
}


# ---- reading a config ----


def _same_spelling(config: Config) -> Config:
    """Check the numbers; return the text model's config in the spelling of transformers 5."""
    if config.get("model_type") == "llama4":
        text = config.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise _refusal(config, "text_config", "it must be the config of the text model")
        config = {"model_type": "llama4_text"} | dict(text)
    config = {_SAME_FIELD.get(name, name): value for name, value in config.items()}
    _check_numbers(config)
    return config | {"rope_parameters": _rope(config)}


def _rope(config: Config) -> dict[str, Any]:
    """Return the rope_parameters of either spelling; raise ValueError if both are there and differ.

    transformers 5 reads rope_scaling and then forgets rope_theta; 4 reads only rope_scaling.
    """
    theta = config.get("rope_theta")
    spellings = {}
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is None:
            continue
        if not isinstance(config[name], Mapping):
            raise _refusal(config, name, "it must be a table")
        _check_numbers(config[name])
        if config[name]:
            rope = spellings[name] = dict(config[name])
            rope.setdefault("rope_type", rope.pop("type", "default"))
            rope.pop("type", None)
            if theta is not None:
                rope.setdefault("rope_theta", theta)
    first = next(iter(spellings.values()), {"rope_type": "default", "rope_theta": theta})
    if any(rope != first for rope in spellings.values()):
        reason = "rope_parameters says otherwise; put one description of RoPE into rope_parameters"
        raise _refusal(config, "rope_scaling", f"{reason} and remove rope_scaling")
    if theta is not None and first.get("rope_theta") != theta:
        raise _refusal(config, "rope_theta", f"the RoPE table has {first['rope_theta']}")
    _require(first, "partial_rotary_factor", {1}, "whole heads are rotated")
    _require(config, "partial_rotary_factor", {1}, "whole heads are rotated")
    return {name: value for name, value in first.items() if value is not None}


def _has_value_head(config: Config) -> bool:
    """Return True for a classifier with one label; raise ValueError if it has several."""
    names = config.get("architectures") or []
    if not any(name.endswith(_CLASSIFIERS) for name in names):
        return False
    labels = config.get("id2label")
    # transformers writes no labels if there are two.
    n_labels = len(labels) if labels else config.get("num_labels", 2)
    if n_labels != 1:
        reason = f"a value head needs one label, not {n_labels}; give a model with num_labels = 1"
        raise _refusal(config, "architectures", reason)
    return True


def _check_numbers(config: Config) -> None:
    for name, value in config.items():
        if value is None:
            continue
        if name in _SIZES:
            smallest, largest = int(name not in _MAY_BE_ZERO), _LARGEST.get(name, _LARGEST_SIZE)
            if type(value) is not int or not smallest <= value <= largest:
                raise _refusal(config, name, f"it must be an integer from {smallest} to {largest}")
        elif name in _FRACTIONS:
            if type(value) not in (int, float) or not 0 <= value < 1e12:
                raise _refusal(config, name, "it must be a number, not negative and below 1e12")
        elif name in _SWITCHES and type(value) is not bool:
            raise _refusal(config, name, "it must be true or false")


def _take(
    config: Config, table: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return our field -> value. num_key_value_heads defaults to the number of query heads."""
    values = {"num_key_value_heads": config.get("num_attention_heads")} | dict(defaults or {})
    values |= {hf: config[hf] for hf in table if config.get(hf) is not None}
    missing = [hf for hf in table if values.get(hf) is None and hf not in (defaults or {})]
    if missing:
        raise ValueError(f"The Hugging Face config lacks {', '.join(missing)}; add them")
    return {ours: values[hf] for hf, ours in table.items()}


def _give(args: Any, table: Mapping[str, str]) -> dict[str, Any]:
    """Return HF field -> value: the inverse of `_take`."""
    fields = {}
    for hf, ours in table.items():
        computed = _COMPUTED.get(ours, ours)
        value = operator.attrgetter(computed if hasattr(args, computed) else ours)(args)
        fields[hf] = args.n_heads if ours == "n_kv_heads" and value is None else value
    return fields


def _require_rope_type(config: Config, allowed: Collection[str]) -> str:
    rope = config["rope_parameters"]
    _require(rope, "rope_type", allowed, "frequencies cannot be scaled that way")
    return rope["rope_type"]


def _require(config: Config, name: str, allowed: Collection[Any], reason: str) -> None:
    if config.get(name) is not None and config[name] not in allowed:
        raise _refusal(config, name, reason)


def _require_layers(config: Config, name: str, expected: list[Any]) -> None:
    if list(config[name]) != expected:
        raise _refusal(config, name, f"the layers must be {expected}")


def _refusal(config: Config, name: str, reason: str) -> ValueError:
    return ValueError(
        f"No model here matches the Hugging Face config: it has {name} = "
        f"{reprlib.repr(config.get(name))}, but {reason}"
    )


# ---- comparing args ----


# Fields that a run sets, or that nothing reads.
_IGNORED_FIELDS = set(
    "max_seq_len eos_id attn_type attn_mask_type depth_init max_batch_size dtype "
    "expert_parallel_comm_backend value_head fp32_head _enforced "
    "moe_args.use_grouped_mm moe_args.load_balance_coeff moe_args._debug_force_load_balance".split()
)
# Properties to compare -> the fields they are computed from, which are not compared.
_DERIVED = {
    "ffn_hidden_dim": ["hidden_dim", "multiple_of", "ffn_dim_multiplier"],
    "expert_hidden_dim": ["moe_inter_dim", "auto_scale_hidden_dim"],
    "attention_head_dim": ["head_dim"],
}


def facts_of(args: DecoderArgs) -> dict[str, Any]:
    """Return name -> value of all fields that affect the weights or the result."""
    facts: dict[str, Any] = {}
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, dict):  # moe_args, rope_scaling_args
            facts |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            facts[name] = value
    dropped = set(_IGNORED_FIELDS)
    for derived, fields in _DERIVED.items():
        if hasattr(args, derived):
            facts[derived] = getattr(args, derived)
            dropped.update(fields)
    if facts.get("n_kv_heads", 0) is None:
        facts["n_kv_heads"] = args.n_heads
    if getattr(args, "moe_enabled", True) is False:
        dropped |= {name for name in facts if name.startswith("moe_")} - {"moe_enabled"}
    elif hasattr(args, "moe_enabled"):  # Qwen 3 with experts in all layers
        dropped.add("hidden_dim")
    if getattr(args, "interleave_moe_layer_step", 0) == 1:
        dropped.add("ffn_hidden_dim")
    if facts.get("moe_args.num_expert_groups", 1) is None:
        dropped.add("moe_args.group_score")
    if not getattr(args, "attn_temperature_tuning", True):
        dropped |= {"floor_scale", "attn_scale"}
    if facts.get("rope_scaling_args.scaling_factor", 1) == 1:  # 1 has the effect of None
        dropped |= {name for name in facts if name.startswith("rope_scaling_args")}
    if facts.get("rope_factor") == 1:
        dropped |= {"original_seq_len", "beta_fast", "beta_slow", "ntk_alpha", "ntk_beta", "mscale"}
    return {name: value for name, value in facts.items() if name not in dropped}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.models.hf_config",
        description="Print the family and flavor that a Hugging Face config.json describes.",
    )
    parser.add_argument("config", help="a config.json, or its folder")
    options = parser.parse_args()
    try:
        match = from_hf_config(options.config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"family: {match.family}")
    if match.model_args.value_head:
        print("head: one value per token, model.value_head = true")
    if match.flavor is not None:
        print(f"flavor: {match.flavor}")
        return
    flavors = get_train_spec(match.family).model_args
    nearest = min(flavors, key=lambda name: len(differing(flavors[name], match.model_args)))
    print(f"flavor: none has these numbers; the nearest is {nearest}, which differs in")
    for name, (flavor_has, config_has) in differing(flavors[nearest], match.model_args).items():
        print(f"  {name}: {flavor_has} in {nearest}, {config_has} in the config")


if __name__ == "__main__":
    main()
