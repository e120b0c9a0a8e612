"""Makes and reads `peft`'s adapter_config.json, and compares it with a model's adapters."""

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torchtitan.config.toml_values import convert
from torchtitan.protocols.state_dict_adapter import shorten
from torchtitan.tools import bounded
from torchtitan.tools.files import read_json_object
from torchtitan.tools.logging import logger

CONFIG_FILE = "adapter_config.json"
# Config field -> the values that describe adapters like ours. Other values, and non-empty fields that
# are not in `_OTHER_FIELDS`, are refused, because they change the base or the adapter's computation.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # Initialisations that don't change the base. All others subtract the initial adapter from the base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Fields that are read here, fields that also follow from the names of the tensors, and fields without effect
# on trained adapters.
_OTHER_FIELDS = set(
    "r lora_alpha rank_pattern alpha_pattern use_rslora target_modules target_parameters "
    "exclude_modules layers_to_transform layers_pattern modules_to_save bias ensure_weight_tying "
    "auto_mapping base_model_name_or_path revision task_type inference_mode peft_version lora_dropout "
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config "
    "runtime_config qalora_group_size".split()
)
_TYPES = {
    "r": int,
    "lora_alpha": float,
    "rank_pattern": dict[str, int],
    "alpha_pattern": dict[str, float],
    "use_rslora": bool,
    "target_modules": list[str] | str,
    "target_parameters": list[str],
}
# Fused parameter of experts in transformers 5 -> the layers of each expert that the parameter joins.
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")  # the name of an expert's layer


class PeftOptions(NamedTuple):
    """base_model: name or folder of the base model. rank: write only this many rows of A; the rest are 0."""

    base_model: str | None
    dropout: float
    has_value_head: bool
    rank: int | None = None


class Layer(NamedTuple):
    rank: int
    scale: float


def config_of(
    layers: Mapping[str, Layer],
    known: Iterable[str],
    trained_whole: Iterable[str],
    options: PeftOptions,
    is_tied: bool,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    layers: HF layer -> its adapter. known: HF names of all matrices. trained_whole: HF names of
    parameters that train whole.
    `peft` for transformers 5 joins experts' gate_proj and up_proj, with twice `r` and `lora_alpha`
    unless the patterns name the joined parameter. In a model with experts, `peft` treats every layer
    named gate_proj, up_proj or down_proj as an expert's; layers with these names outside experts are
    listed in target_parameters.
    """
    known = set(known)
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: round(layer.scale * layer.rank, 9) for name, layer in layers.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common() or [(8, 0)]
    (alpha, _), *_ = Counter(alphas.values()).most_common() or [(8.0, 0)]
    has_experts = any(map(_EXPERT.fullmatch, known))
    names_of_experts = {part for parts in EXPERTS.values() for part in parts}
    named_like_experts = {n for n in known if n.rpartition(".")[2] in names_of_experts}
    as_parameters = {n for n in named_like_experts if has_experts and not _EXPERT.fullmatch(n)}

    def end(name: str) -> str:  # the suffix that matches this layer in all blocks
        if (expert := _EXPERT.fullmatch(name)) and as_parameters:
            return f"experts.{expert[2]}.{expert[3]}"
        return name.rpartition(".")[2]

    left_out = {end(name) for name in known - layers.keys()}
    as_modules = layers.keys() - as_parameters
    targets = {end(name) for name in as_modules} - left_out
    targets |= {name for name in as_modules if end(name) in left_out}

    def patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
        """Return {regex of a layer's name: value} for the layers whose value is not the default."""
        found = {}
        for name in sorted(layers):
            if values[name] != default:
                name_or_parameter = f"{name}(\\.weight)?" if name in as_parameters else name
                found[_EXPERT.sub(r"\1(\\.\\d+)?.\3", name_or_parameter)] = values[name]
        return found

    rank_pattern, alpha_pattern = patterns(ranks, rank), patterns(alphas, alpha)
    for name, layer in _joined_gates(layers).items():
        if layer != Layer(2 * rank, alpha / rank):
            rank_pattern[name] = layer.rank
            alpha_pattern[name] = round(layer.scale * layer.rank, 9)
    biases = {name for name in trained_whole if name.endswith(".bias")}
    biases -= {f"{name.removesuffix('.weight')}.bias" for name in trained_whole}
    whole = sorted({name.rpartition(".")[0] for name in set(trained_whole) - biases})
    parameters = sorted(f"{name}.weight" for name in layers.keys() & as_parameters)
    has_parameters = bool(parameters) or any(map(_EXPERT.fullmatch, layers))
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if options.has_value_head else "CAUSAL_LM",
        "base_model_name_or_path": options.base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        # peft refuses dropout for parameters.
        "lora_dropout": 0.0 if has_parameters else options.dropout,
        "use_rslora": False,
        "target_modules": sorted(targets),
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "modules_to_save": whole or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": False,
        **({"ensure_weight_tying": True} if is_tied and "model.embed_tokens" in whole else {}),
    }


def _joined_gates(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """Return the layers that `peft` for transformers 5 joins; warn about experts it cannot join."""
    joined, unreadable = {}, []
    for experts in sorted({expert[1] for expert in map(_EXPERT.fullmatch, layers) if expert}):
        gate, up = (layers.get(f"{experts}.0.{part}") for part in EXPERTS["gate_up_proj"])
        if gate and up and gate.scale == up.scale:
            joined[f"{experts}.gate_up_proj"] = Layer(gate.rank + up.rank, gate.scale)
        elif gate or up:
            unreadable.append(experts)
    if unreadable:
        logger.warning(
            f"peft for transformers 5 cannot read the adapters of {shorten(unreadable)}, because it "
            "joins gate_proj and up_proj, which need adapters of one scale"
        )
    return joined


def read_config(folder: str) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises ValueError if the file is missing, or describes other adapters than plain LoRA.
    """
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.exists(path):
        raise ValueError(
            f"{folder} must be a folder in PEFT's format, and has no {CONFIG_FILE}; give the folder "
            "that save_pretrained or save_peft wrote"
        )
    config = {key: value for key, value in read_json_object(path).items() if value is not None}
    for field in config.keys() - _OTHER_FIELDS:
        value, allowed = config[field], _PLAIN.get(field)
        if value not in allowed if allowed else value:
            raise ValueError(
                f"{path} has {field} = {value!r}, and only adapters "
                f"{f'with {field} in {allowed}' if allowed else 'without it'} can be read; use peft "
                "to merge the adapters into the base model, or to convert them to plain LoRA"
            )
    for field in _TYPES.keys() & config.keys():
        value = config[field]
        try:
            config[field] = convert(value, _TYPES[field])
            numbers = value.values() if isinstance(value, dict) else [value]
            if any(isinstance(x, int | float) and not 0 <= x < math.inf for x in numbers):
                raise TypeError("expected finite numbers that are not negative")
        except TypeError as error:
            raise ValueError(f"{path} has {field} = {value!r}: {error}; correct it") from None
    return config


def other_scales(
    layers: Mapping[str, Layer],
    config: Mapping[str, Any],
    fused: Collection[str],
    folder: str,
) -> Iterable[str]:
    """Yield a message for each layer whose rank or scale in the config differs from the model's.

    fused: experts' layers whose adapters the file has in the fused format of `peft` for transformers 5.
    """
    parameter_of = {part: name for name, parts in EXPERTS.items() for part in parts}
    names = [
        _EXPERT.sub(lambda x: f"{x[1]}.{parameter_of[x[3]]}", layer) if layer in fused else layer
        for layer in layers
    ]

    def values(field: str, default: float) -> list[float]:
        by_pattern = config.get(f"{field}_pattern") or {}
        if not by_pattern:
            return [default] * len(names)
        regexes = {rf"(.*\.)?({p})(\.weight)?": value for p, value in by_pattern.items()}
        try:  # the first pattern that matches counts, as in peft
            found = bounded.call("torchtitan.tools.bounded:first_matches", list(regexes), names)
        except (ValueError, bounded.OutOfBoundsError) as error:
            raise ValueError(
                f"{os.path.join(folder, CONFIG_FILE)} has {field}_pattern = {by_pattern}, which cannot be "
                f"compared with the names of the layers: {error}; use the names of layers as patterns"
            ) from None
        return [default if pattern is None else regexes[pattern] for pattern in found]

    saved_ranks = values("rank", config.get("r", 8))
    alphas = values("alpha", config.get("lora_alpha", 8.0))
    for layer, saved_rank, alpha in zip(layers, saved_ranks, alphas, strict=True):
        rank, scale = layers[layer]
        if saved_rank != rank:
            yield f"{layer} has rank {rank} in the file, but the config says {saved_rank}; correct it"
        divisor = rank**0.5 if config.get("use_rslora") else rank
        if abs(alpha / divisor - scale) > 1e-6 * scale:
            yield (
                f"{layer} is scaled by {alpha / divisor:g} in the file and by {scale:g} in the "
                f"model; set lora.alpha = {alpha:g} and lora.use_rslora = "
                f"{str(bool(config.get('use_rslora'))).lower()}"
            )
