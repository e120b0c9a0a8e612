"""Converts a Hugging Face (HF) config.json to our model args, and model args to a config.json.

    python -m torchtitan.models.hf_config path/to/config.json

Written files use the field names of transformers 4 (rope_theta, rope_scaling), which transformers 5
and vLLM also read.
"""

import argparse
import dataclasses
import importlib
import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from torchtitan import models
from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf_fields import (
    ALL_TYPES,
    DERIVED,
    MOE,
    Config,
    HFType,
    give,
    refusal,
    take,
)
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.files import read_json_object
from torchtitan.tools.logging import logger, warn_once

Args = TypeVar("Args", bound=DecoderArgs)
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")  # suffixes of class names


class HFMatch(NamedTuple):
    """The model that a config.json describes; `flavor` is None if no flavor has equal args."""

    family: str
    flavor: str | None
    model_args: DecoderArgs


def from_hf_config(config: Config | str | os.PathLike[str]) -> HFMatch:
    """Return the model's family, the flavor with equal args (or None), and new model args.

    config: the path or folder of a config.json, or its content, in the spelling of transformers 4 or
        5. A classifier with one label becomes a model with a value head.
    Raises ValueError, naming the field and the reason, for a config that the family cannot express.
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

    types = hf_types()
    config = _text_config(config, types)
    aliases = {alias: name for name, (_, hf_type) in types.items() for alias in hf_type.aliases}
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        model_type = aliases.get(model_type, model_type)
    if not isinstance(model_type, str) or model_type not in types:
        raise refusal(config, "model_type", f"known are {', '.join(sorted(types))}")
    family, hf_type = types[model_type]
    flavors = get_train_spec(family).model_args
    args_cls = type(next(iter(flavors.values())))
    model_args = args_of({**config, "model_type": model_type}, hf_type, args_cls)
    known = NOT_READ.union(*(row.fields for row in (*ALL_TYPES, *hf_type.rows)))
    unknown = [name for name in config if name not in known and name[:1] != "_" and config[name]]
    if unknown:
        warn_once(
            logger,
            f"The config.json of a {model_type} has fields that are not read: {', '.join(unknown)}; "
            "the converted model is correct only if these fields don't change its results",
        )
    same = [name for name, args in flavors.items() if not differing(args, model_args)]
    return HFMatch(family, same[0] if same else None, model_args)


def args_of(config: Config, hf_type: HFType, args_cls: type[Args]) -> Args:
    """Return new args for a config of this type. Raises ValueError like `from_hf_config`."""
    config, rows = {**hf_type.defaults, **config}, (*ALL_TYPES, *hf_type.rows)
    try:
        eos = config.get("eos_token_id")
        values = {"value_head": _has_value_head(config), **hf_type.args, **take(config, rows)}
        if hasattr(args_cls, "hf_type"):
            values["hf_type"] = config["model_type"]
        if eos is not None:
            values["eos_id"] = eos[0] if isinstance(eos, list) else eos
        experts = {k.removeprefix(MOE): v for k, v in values.items() if k.startswith(MOE)}
        model_args = args_cls(**{k: v for k, v in values.items() if not k.startswith(MOE)})
        if experts:
            model_args.moe_args = dataclasses.replace(model_args.moe_args, **experts)
        for row in rows:
            row.check(config, model_args)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"A field of the Hugging Face config is missing or has the wrong type "
            f"({type(error).__name__}: {error}); give the config.json of a model"
        ) from error
    n_kv_heads = getattr(model_args, "n_kv_heads", None)
    if n_kv_heads and model_args.n_heads % n_kv_heads:
        raise refusal(
            config, "num_key_value_heads", f"it must divide the {model_args.n_heads} query heads"
        )
    return model_args


def hf_types() -> dict[str, tuple[str, HFType]]:
    """Return model_type -> (our family, its `HFType`)."""
    return {
        model_type: (family, hf_type)
        for family, path in models.module_paths.items()
        for model_type, hf_type in getattr(importlib.import_module(path), "hf_types", {}).items()
    }


def _text_config(config: Config, types: Mapping[str, tuple[str, HFType]]) -> dict[str, Any]:
    """Return the config of a multimodal model's text model; return other configs unchanged."""
    kind = config.get("model_type")
    inner = [name for name, (_, hf_type) in types.items() if kind in hf_type.inside]
    if not inner:
        return dict(config)
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise refusal(config, "text_config", "it must be the config of the text model")
    shared = {name: config[name] for name in _ON_BOTH_LEVELS if name in config}
    return {"model_type": inner[0]} | shared | dict(text)


def to_hf_config(model_args: Any) -> dict[str, Any]:
    """Return the content of a config.json for these args, without ids of special tokens.

    Raises ValueError if Hugging Face has no model with these args.
    """

    def n_other(hf_type: HFType) -> int:
        return sum(operator.attrgetter(name)(model_args) != x for name, x in hf_type.args.items())

    types = {
        model_type: hf_type
        for model_type, (family, hf_type) in hf_types().items()
        if type(model_args) is type(next(iter(get_train_spec(family).model_args.values())))
    }
    if (own := getattr(model_args, "hf_type", None)) in types:
        types = {own: types[own]}
    if not types:
        raise ValueError(f"{type(model_args).__name__} belongs to no family with a config.json")
    model_type = min(types, key=lambda name: n_other(types[name]))
    hf_type = types[model_type]
    head = "ForTokenClassification" if model_args.value_head else "ForCausalLM"
    config = {
        "architectures": [hf_type.name + head],
        "model_type": model_type,
        "initializer_range": 0.02,
        "pad_token_id": None,  # transformers' default id may exceed a small vocabulary
        **give(model_args, (*ALL_TYPES, *hf_type.rows)),
    }
    if model_args.value_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    try:
        described = from_hf_config(config).model_args
    except ValueError as error:
        raise ValueError(f"Hugging Face has no model with these args: {error}") from error
    if different := differing(model_args, described):
        pairs = [
            f"{name} = {ours} (must be {theirs})" for name, (ours, theirs) in different.items()
        ]
        raise ValueError(
            f"Hugging Face's {model_type} cannot express {', '.join(pairs)}; choose a flavor with "
            "values that it can express"
        )
    return config


_ON_BOTH_LEVELS = ("tie_word_embeddings", "eos_token_id")  # values in text_config take precedence
# Fields that do not change what our models compute.
NOT_READ = frozenset(
    "model_type architectures initializer_range transformers_version dtype torch_dtype use_cache "
    "bos_token_id eos_token_id pad_token_id id2label label2id num_labels auto_map problem_type "
    "return_dict output_attentions output_hidden_states quantization_config compression_config "
    "attn_implementation pretraining_tp output_router_logits router_aux_loss_coef aux_loss_alpha "
    "seq_aux ep_size qk_head_dim max_window_layers sliding_window num_nextn_predict_layers "
    "num_mtp_layers mtp_num_hidden_layers num_mtp_modules unsloth_version unsloth_fixed "
    "vocab_size_per_layer_input use_double_wide_mlp top_k_experts".split()
)


def _has_value_head(config: Config) -> bool:
    names = config.get("architectures") or []
    if not any(name.endswith(_CLASSIFIERS) for name in names):
        return False
    labels = config.get("id2label")
    # transformers writes no id2label if there are two labels.
    n_labels = len(labels) if labels else config.get("num_labels", 2)
    if n_labels != 1:
        reason = f"a value head needs one label, not {n_labels}; give a model with num_labels = 1"
        raise refusal(config, "architectures", reason)
    return True


def differing(a: DecoderArgs, b: DecoderArgs) -> dict[str, tuple[Any, Any]]:
    """Return name -> (a's value, b's value) of fields that differ and affect the weights or the result."""
    scalings = [getattr(args, "rope_scaling_args", None) for args in (a, b)]
    if all(scalings):  # args with different original lengths may give the same frequencies
        shortest = [dataclasses.astuple(scaling.shortened(1)) for scaling in scalings]
        if shortest[0] == shortest[1]:
            b = dataclasses.replace(b, rope_scaling_args=scalings[0])
    facts_a, facts_b = facts_of(a), facts_of(b)
    pairs = {name: (facts_a.get(name), facts_b.get(name)) for name in facts_a | facts_b}
    if a.value_head or b.value_head:
        del pairs["enable_weight_tying"]  # a model with a value head has no output projection
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def names_of_choices(table: Mapping[str, Any]) -> set[str]:
    """Return all names under which `differing` may report the fields of `table`, the config's `model.args`."""
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    names = {*table, *(f"{name}.{field}" for name, value in tables.items() for field in value)}
    return names | {derived for derived, fields in DERIVED.items() if names & {*fields}}


# Fields that depend on the run and not on the weights, and fields that no code reads.
_IGNORED_FIELDS = set(
    "max_seq_len eos_id attn_type attn_mask_type depth_init max_batch_size dtype "
    "expert_parallel_comm_backend value_head fp32_head _enforced "
    "moe_args.use_grouped_mm moe_args.load_balance_coeff moe_args._debug_force_load_balance".split()
)


def facts_of(args: DecoderArgs) -> dict[str, Any]:
    """Return name -> value of all fields that affect the weights or the result."""
    facts: dict[str, Any] = {}
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, dict):  # such as moe_args and rope_scaling_args
            facts |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            facts[name] = value
    dropped = set(_IGNORED_FIELDS)
    for derived, fields in DERIVED.items():
        if hasattr(args, derived):
            facts[derived] = getattr(args, derived)
            dropped.update(fields)
    if facts.get("n_kv_heads", 0) is None:
        facts["n_kv_heads"] = args.n_heads
    if getattr(args, "moe_enabled", True) is False:
        dropped |= {name for name in facts if name.startswith("moe_")} - {"moe_enabled"}
    elif hasattr(args, "moe_enabled") and not getattr(args, "dense_layers", ()):
        # If every layer has experts, hidden_dim is not used.
        dropped.add("hidden_dim")
    if getattr(args, "interleave_moe_layer_step", 0) == 1:
        dropped.add("ffn_hidden_dim")
    if facts.get("moe_args.num_expert_groups", 1) is None:
        dropped.add("moe_args.group_score")
    if not getattr(args, "attn_temperature_tuning", True):
        dropped |= {"floor_scale", "attn_scale"}
    if facts.get("rope_scaling_args.scaling_factor", 1) == 1:  # factor 1 is the same as None
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
        family, flavor, args = from_hf_config(options.config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"family: {family}")
    if args.value_head:
        print("head: one value per token, model.value_head = true")
    if flavor is not None:
        print(f"flavor: {flavor}")
        return
    flavors = get_train_spec(family).model_args
    nearest = min(flavors, key=lambda name: len(differing(flavors[name], args)))
    print(f"flavor: none matches the config; the nearest is {nearest}, which differs in")
    for name, (flavor_has, config_has) in differing(flavors[nearest], args).items():
        print(f"  {name}: {flavor_has} in {nearest}, {config_has} in the config")


if __name__ == "__main__":
    main()
