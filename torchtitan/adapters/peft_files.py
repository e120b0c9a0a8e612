"""Adapters in the files of the library `peft`: adapter_config.json and adapter_model.safetensors.

M is the name of a layer in Hugging Face's model. A [r, K] and B [N, r] of layer M are stored as
base_model.model.M.lora_A.weight and base_model.model.M.lora_B.weight, and a trained bias of M as
base_model.model.M.base_layer.bias. Other parameters that train whole are stored as
base_model.model.<name>. Rows of B have the order of the rows of Hugging Face's weight. Files have one
layer per expert; `_fused_experts` also reads the fused experts of `peft` for transformers 5. That
release converts files with one layer per expert to its fused format; `_config` writes what it needs.

If M joins the rows of several of our weights, its A has the rows of their A's below each other, and its B
has their B's as blocks: [B1 0; 0 B2] [A1; A2]. An adapter of `peft`, whose parts share one A, gives each of
our weights a copy of A.
"""

import copy
import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchtitan.adapters.lora import Adapted, adapted_weights, adapter_names
from torchtitan.config.toml_values import convert
from torchtitan.distributed.dtensor import (
    is_dtensor,
    local_shape_and_offsets,
    local_tensor,
    whole_tensor,
)
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero, on_all_ranks
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, shorten
from torchtitan.tools import bounded
from torchtitan.tools.files import (
    open_file,
    read_json_object,
    regular_file,
    save_tensors,
    whole_file,
)
from torchtitan.tools.logging import logger

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Config field -> the values that describe adapters like ours. Other values, and non-empty fields that
# are not in `_OTHER_FIELDS`, are refused, because they change the base or the adapter's computation.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # Initialisations that don't change the base. Others subtract the initial adapter from the base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Fields read here, fields that the tensor names repeat, and fields without effect on trained adapters.
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
# Fused parameter of experts in transformers 5 -> the layers of each expert that it holds.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")  # the name of an expert's layer


class PeftOptions(NamedTuple):
    """base_model: name or folder of the base model. rank: rows of A from this index on are zero."""

    base_model: str | None
    dropout: float
    has_value_head: bool
    rank: int | None = None


class _Layer(NamedTuple):
    rank: int
    scale: float


class _Stored(NamedTuple):
    """A matrix in a file. cut: its slices of the stored tensor, which may hold all experts."""

    key: str
    shape: tuple[int, ...]
    cut: tuple[slice, ...] = ()


class _Target(NamedTuple):
    """Layers of Hugging Face's model with the adapters of our weights.

    layers: one, or one per expert. weights: those whose rows the layer joins; usually one. adapted: their
    adapters, in the order of `weights`.
    """

    layers: list[str]
    weights: list[str]
    adapted: list[Adapted]


# ---- writing ----


@torch.no_grad()
def save_peft(
    folder: str,
    parts: list[nn.Module],
    entries: Mapping[str, Any],
    trained: Iterable[str],
    adapter: BaseStateDictAdapter,
    options: PeftOptions,
) -> None:
    """Write the adapters, and the parameters that train whole, to `folder`. Collective.

    entries: the state dict of this rank's parts. trained: names of all trained parameters. Raises
    ValueError for an adapter of a weight that Hugging Face does not store as a linear layer.
    """
    adapter = copy.copy(adapter)  # copy, because a conversion changes the adapter's state
    adapted = list(adapted_weights(parts))
    tensors: dict[str, Tensor] = {}
    layers: dict[str, _Layer] = {}
    for target in _targets_of(adapted, entries, adapter):
        scale = target.adapted[0].scale
        pairs = {
            one.weight: (
                whole_tensor(entries[one.a])[..., : options.rank, :],
                whole_tensor(entries[one.b])[..., : options.rank] * (one.scale / scale),
            )
            for one in target.adapted
        }
        a = torch.cat([a for a, _ in pairs.values()], dim=-2)
        blocks, first = {}, 0
        for name in target.weights:
            blocks[name] = a.new_zeros(*a.shape[:-2], _n_rows(entries, name), a.shape[-2])
            if name in pairs:
                b = pairs[name][1]
                blocks[name][..., first : first + b.shape[-1]] = b
                first += b.shape[-1]
        # B's rows are the weight's rows, which the state-dict adapter may reorder; A's rows are not.
        b_parts = adapter.to_hf(blocks).values()
        a_parts = a.unbind() if a.ndim == 3 else [a]
        for hf_layer, a_part, b_part in zip(target.layers, a_parts, b_parts, strict=True):
            layers[hf_layer] = _Layer(a_part.shape[0], scale)
            tensors[_matrix(hf_layer, "A")] = a_part
            tensors[_matrix(hf_layer, "B")] = b_part
    in_adapters = adapter_names(adapted)
    trained_whole = adapter.to_hf(
        {name: whole_tensor(entries[name]) for name in trained if name not in in_adapters}
    )
    for name, other in adapter.hf_aliases().items():
        if name in trained_whole:  # PEFT's files hold tied weights twice
            trained_whole[other] = trained_whole[name].clone()
    tensors |= {_key(name, layers): tensor for name, tensor in trained_whole.items()}

    # Pipeline stages have different tensors. The first rank that has a tensor sends it.
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    sent = {name for earlier in all_ranks(sorted(tensors))[:rank] for name in earlier}
    own = {name: t.contiguous().cpu() for name, t in tensors.items() if name not in sent}
    everything = {name: tensor for part in all_ranks(own) for name, tensor in part.items()}
    matrices = [name for name, t in entries.items() if t.ndim > 1 and name not in in_adapters]
    groups = adapter.groups_of(matrices)
    hf_matrices = [hf for names in groups for hf in _hf_layers(names, entries, adapter)]
    of_ranks = all_ranks((layers, hf_matrices, list(trained_whole)))
    all_layers = {name: layer for part, _, _ in of_ranks for name, layer in part.items()}
    known, names = ({name for part in of_ranks for name in part[i]} for i in (1, 2))
    is_tied = getattr(getattr(adapter, "model_args", None), "enable_weight_tying", False)
    config = _config(all_layers, known, names, options, is_tied)

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, WEIGHTS_FILE)
        with whole_file(path) as weights:  # put in place last: a folder with this file is complete
            save_tensors(dict(sorted(everything.items())), weights.name)
            with suppress(FileNotFoundError):  # an older file does not belong to the new config
                os.unlink(path)
            with whole_file(os.path.join(folder, CONFIG_FILE)) as file:
                file.write(json.dumps(config, indent=2, sort_keys=True).encode())

    from_rank_zero(write)
    logger.info(f"Wrote the adapters of {len(all_layers)} layers to {folder}")


def check_layers(
    parts: list[nn.Module], entries: Mapping[str, Any], adapter: BaseStateDictAdapter
) -> None:
    """Raise ValueError if PEFT's files have no place for an adapter; see `save_peft`. Collective."""
    _targets_of(list(adapted_weights(parts)), entries, copy.copy(adapter))


def _matrix(layer: str, kind: str) -> str:
    return f"{_PREFIX}{layer}.lora_{kind}.weight"


def _n_rows(entries: Mapping[str, Any], weight: str) -> int:
    return entries[weight].shape[-2]


def _key(hf_name: str, layers: Collection[str]) -> str:
    """Return the file's key of a parameter that trains whole. layers: the layers with an adapter."""
    layer, _, kind = hf_name.rpartition(".")
    is_inside = kind == "bias" and layer in layers
    return _PREFIX + (f"{layer}.base_layer.bias" if is_inside else hf_name)


def _hf_layers(
    weights: Iterable[str], entries: Mapping[str, Any], adapter: BaseStateDictAdapter
) -> list[str]:
    """Return the HF layers of weights that `to_hf` converts together; [] if HF has no such layers."""
    empty = {name: torch.empty(entries[name].shape, device="meta") for name in weights}
    return [
        name.removesuffix(".weight") for name in adapter.to_hf(empty) if name.endswith(".weight")
    ]


def _targets_of(
    adapted: list[Adapted], entries: Mapping[str, Any], adapter: BaseStateDictAdapter
) -> list[_Target]:
    """Return the layers with adapters. Collective; raises ValueError if HF has no layer for a weight."""
    by_weight = {one.weight: one for one in adapted}
    in_adapters = adapter_names(adapted)
    groups = adapter.groups_of(n for n, t in entries.items() if t.ndim > 1 and n not in in_adapters)
    targets = []
    for weights in groups:
        own = [by_weight.pop(name) for name in weights if name in by_weight]
        try:
            layers = [_hf_layers([one.weight], entries, adapter) for one in own]
        except ValueError:  # Hugging Face's model joins the weights
            targets.append(_Target(_hf_layers(weights, entries, adapter), weights, own))
        else:
            targets += map(_Target, layers, [[one.weight] for one in own], [[one] for one in own])
    missing = [*by_weight, *(t.adapted[0].weight for t in targets if not t.layers)]
    if missing := [name for part in all_ranks(missing) for name in part]:
        raise ValueError(
            f"PEFT's files have no place for the adapter of {shorten(missing)}, no linear layer of Hugging "
            "Face's model; leave it out of lora.target_modules, or write merged weights with save_hf"
        )
    return targets


def _config(
    layers: Mapping[str, _Layer],
    known: Iterable[str],
    trained_whole: Iterable[str],
    options: PeftOptions,
    is_tied: bool,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    layers: HF layers with an adapter. known: HF names of matrices. trained_whole: of parameters.
    `peft` for transformers 5 joins experts' gate_proj and up_proj, with twice `r` and `lora_alpha`
    unless the patterns name the joined parameter. In a model with experts it takes all layers with
    such names for experts; others are listed in target_parameters.
    """
    known = set(known)
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: round(layer.scale * layer.rank, 9) for name, layer in layers.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common() or [(8, 0)]
    (alpha, _), *_ = Counter(alphas.values()).most_common() or [(8.0, 0)]
    has_experts = any(map(_EXPERT.fullmatch, known))
    names_of_experts = {part for parts in _EXPERTS.values() for part in parts}
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
        """Return regular expression of a layer's name -> its value, if not the default."""
        found = {}
        for name in sorted(layers):
            if values[name] != default:
                name_or_parameter = f"{name}(\\.weight)?" if name in as_parameters else name
                found[_EXPERT.sub(r"\1(\\.\\d+)?.\3", name_or_parameter)] = values[name]
        return found

    rank_pattern, alpha_pattern = patterns(ranks, rank), patterns(alphas, alpha)
    for name, layer in _joined_gates(layers).items():
        if layer != _Layer(2 * rank, alpha / rank):
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


def _joined_gates(layers: Mapping[str, _Layer]) -> dict[str, _Layer]:
    """Return the layers that `peft` for transformers 5 joins; warn about experts it cannot join."""
    joined, unreadable = {}, []
    for experts in sorted({expert[1] for expert in map(_EXPERT.fullmatch, layers) if expert}):
        gate, up = (layers.get(f"{experts}.0.{part}") for part in _EXPERTS["gate_up_proj"])
        if gate and up and gate.scale == up.scale:
            joined[f"{experts}.gate_up_proj"] = _Layer(gate.rank + up.rank, gate.scale)
        elif gate or up:
            unreadable.append(experts)
    if unreadable:
        logger.warning(
            f"peft for transformers 5 cannot read the adapters of {shorten(unreadable)}, because it "
            "joins gate_proj and up_proj, which need adapters of one scale"
        )
    return joined


# ---- reading ----


@torch.no_grad()
def load_peft(
    folder: str,
    parts: list[nn.Module],
    entries: Mapping[str, Any],
    trained: Iterable[str],
    adapter: BaseStateDictAdapter,
) -> None:
    """Read the adapters, and the parameters that train whole, from `folder`. Collective.

    entries, trained: see `save_peft`. Raises ValueError on all ranks, before anything changes, if the
    files hold another kind of adapter, do not fit the model, or differ between ranks.
    """
    adapter = copy.copy(adapter)
    path = os.path.join(folder, WEIGHTS_FILE)
    config, stored = _read_headers(folder)
    # The files of a multimodal model may have the text model's names, and the other way round.
    adapter = adapter.for_export([key.removeprefix(_PREFIX) for key in stored])
    adapted = list(adapted_weights(parts))
    targets = _targets_of(adapted, entries, adapter)
    in_adapters = adapter_names(adapted)
    whole = {name: entries[name] for name in trained if name not in in_adapters}
    in_hf = adapter.to_hf({n: torch.empty(t.shape, device="meta") for n, t in whole.items()})
    own, wanted = {}, {}
    for target in targets:
        rank, scale = _rank_in(stored, target, entries), target.adapted[0].scale
        n_inputs = entries[target.adapted[0].a].shape[-1]
        n_rows = sum(_n_rows(entries, name) for name in target.weights)
        for name in target.layers:
            own[name] = _Layer(rank, scale)
            wanted |= {_matrix(name, "A"): (rank, n_inputs), _matrix(name, "B"): (n_rows, rank)}
    keys = {name: _key(name, own) for name in in_hf}
    wanted |= {keys[name]: tuple(tensor.shape) for name, tensor in in_hf.items()}
    # Keys of redundant tensors in peft's files -> the key or tensor that each must equal: tied weights
    # under their second name, and the frozen weight of an output projection that has an adapter.
    copies: dict[str, Any] = {
        _PREFIX + other: _PREFIX + name
        for name, other in adapter.hf_aliases().items()
        if name in in_hf
    }
    output = f"{_PREFIX}lm_head.base_layer.weight"
    for target in targets:
        if target.layers == ["lm_head"] and output in stored:
            copies[output] = whole_tensor(entries[target.weights[0]]).cpu()
    for key in set().union(*all_ranks(sorted(copies))):
        stored.pop(key, None)
    matrices = _matching(stored, wanted, own, config, folder)

    def read() -> list[tuple[Tensor, Tensor]]:
        """Return pairs of our parameter and its new value."""
        values = []
        with safe_open(regular_file(path), framework="pt") as file:
            _check_copies(copies, file, path)
            stored_tensor = functools.lru_cache(1)(file.get_tensor)  # reads fused experts once

            def tensor_of(key: str) -> Tensor:
                tensor = stored_tensor(matrices[key].key)[matrices[key].cut]
                if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                    raise ValueError(
                        f"{path} has numbers that are not finite, or not floating-point, in "
                        f"{key.removeprefix(_PREFIX)}; train or save it again"
                    )
                return tensor

            for target in targets:
                a, b = ([tensor_of(_matrix(name, kind)) for name in target.layers] for kind in "AB")
                one = target.adapted[0]
                if entries[one.a].ndim == 3:
                    values += [(entries[one.a], torch.stack(a)), (entries[one.b], torch.stack(b))]
                else:
                    blocks = adapter.from_hf({f"{target.layers[0]}.weight": b[0]})
                    values += _parts_of(target, entries, a[0], blocks)
            ours = adapter.from_hf({name: tensor_of(key) for name, key in keys.items()})
        return values + [(whole[name], ours[name]) for name in whole if name in ours]

    values: list[tuple[Tensor, Tensor]] = []
    on_all_ranks(lambda: values.extend(read()))
    for parameter, tensor in values:
        _fill(parameter, tensor)
    logger.info(f"Read the adapters of {len(targets)} layers from {folder}")


def _rank_in(
    stored: Mapping[str, tuple[int, ...]], target: _Target, entries: Mapping[str, Any]
) -> int:
    """Return the rank of the target's layers in the file: all parts' ranks together, or the rank of each."""
    ranks = [entries[one.a].shape[-2] for one in target.adapted]
    in_file = stored.get(_matrix(target.layers[0], "A"), (None,))[0]
    return sum(ranks) if in_file == sum(ranks) or len(set(ranks)) > 1 else ranks[0]


def _parts_of(
    target: _Target, entries: Mapping[str, Any], a: Tensor, blocks: Mapping[str, Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield our parameters of a layer and their values, from its A and, for each of our weights, rows of its B.

    Raises ValueError if the rows need more than our adapters hold.
    """
    rest, first = dict(blocks), 0
    for one in target.adapted:
        rank, b = entries[one.a].shape[-2], rest.pop(one.weight)
        own = slice(first, first + rank) if a.shape[-2] > rank else slice(None)
        outside = b.clone()
        outside[:, own] = 0
        rest[f"{one.weight}, other columns"] = outside
        yield entries[one.a], a[own]
        yield entries[one.b], b[:, own] * (target.adapted[0].scale / one.scale)
        first += rank
    if others := [name for name, rows in rest.items() if rows.any()]:
        raise ValueError(
            f"The adapter of {target.layers[0]} needs adapters of {len(blocks)} weights of rank "
            f"{a.shape[-2]}, which it joins, and the model's cannot hold {shorten(others)}; set "
            f"lora.target_modules to include {target.layers[0].rpartition('.')[2]} and lora.rank, or "
            f"lora.rank_pattern, to {a.shape[-2]}"
        )


def _read_headers(folder: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config, and key -> shape of the weights file. Raises if ranks have different files."""
    path = os.path.join(folder, WEIGHTS_FILE)
    headers = from_rank_zero(lambda: (read_config(folder), _shapes_in(path)))

    def digest() -> str:
        with open_file(path, "rb") as file:
            result = hashlib.file_digest(file, "sha256")
        with open_file(os.path.join(folder, CONFIG_FILE), "rb") as file:
            result.update(file.read())
        return result.hexdigest()

    digests = on_all_ranks(digest)
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise ValueError(
            f"The files in {folder} differ between rank 0 and ranks {others}; give all ranks the same"
        )
    return headers


def _matching(
    stored: dict[str, tuple[int, ...]],
    wanted: dict[str, tuple[int, ...]],
    layers: Mapping[str, _Layer],
    config: Mapping[str, Any],
    folder: str,
) -> dict[str, _Stored]:
    """Return this rank's `wanted` keys' matrices in the file; ValueError if they differ. Collective."""
    all_wanted = {key: shape for part in all_ranks(wanted) for key, shape in part.items()}
    of_experts = _fused_experts(stored, all_wanted, config.get("target_parameters") or ())
    fused = {matrix.key for matrix in of_experts.values()}
    matrices = {key: _Stored(key, shape) for key, shape in stored.items() if key not in fused}
    matrices |= of_experts
    shapes = {key: matrix.shape for key, matrix in matrices.items()}
    problem = next(iter(_differences(shapes, all_wanted)), None)
    scales = on_all_ranks(
        lambda: next(iter(_other_scales(layers, config, of_experts, folder)), None)
    )
    if problem := next(filter(None, [problem, *scales]), None):
        raise ValueError(f"The adapters in {folder} do not fit the model's: {problem}")
    return matrices


def _check_copies(copies: Mapping[str, Any], file: Any, path: str) -> None:
    """Raise ValueError if a redundant tensor (see `load_peft`) differs by more than dtype rounding."""
    for key in copies.keys() & {*file.keys()}:
        tensor, other = file.get_tensor(key), copies[key]
        other = file.get_tensor(other) if isinstance(other, str) else other
        if tensor.shape != other.shape or not (
            torch.equal(tensor, other.to(tensor.dtype))
            or torch.equal(tensor.to(other.dtype), other)
        ):
            raise ValueError(
                f"{path} has a {key.removeprefix(_PREFIX)} that differs from the weight that the "
                "model shares or keeps; untie the base, or merge with peft"
            )


def read_config(folder: str) -> dict[str, Any]:
    """Return adapter_config.json; ValueError if the folder has none, or one of another kind."""
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.exists(path):
        raise ValueError(
            f"{folder} must be a folder in PEFT's format, and has no {CONFIG_FILE}; give the folder "
            "that save_pretrained or save_peft wrote"
        )
    config = {key: value for key, value in read_json_object(path).items() if value is not None}
    for field, value in config.items():
        allowed = _PLAIN.get(field)
        if field in _OTHER_FIELDS or (not value and allowed is None):
            continue
        if allowed is None or value not in allowed:
            raise ValueError(
                f"{path} has {field} = {value!r}, and only adapters "
                f"{f'with {field} in {allowed}' if allowed else 'without it'} can be read; merge these "
                "into the base model with peft, or convert them to plain ones there"
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


def _shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    if not os.path.exists(path):
        raise ValueError(
            f"There is no file {path}; give the folder that save_pretrained or save_peft wrote. A .bin "
            "there is not read, because reading a pickle can run code: open the folder with peft and "
            "call save_pretrained"
        )
    try:
        with safe_open(regular_file(path), framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; write the adapters again") from error


def _fused_experts(
    stored: Mapping[str, tuple[int, ...]], wanted: Iterable[str], parameters: Collection[str]
) -> dict[str, _Stored]:
    """Return key -> matrix of the fused experts' adapters in a file of `peft` for transformers 5.

    gate_up_proj [E, 2 H, D] of E experts has A [E r, D] and B [2 H, r E]; down_proj [E, D, H] has
    A [E r, H] and B [D, r E]. `peft` wraps the experts once for each of `parameters`, so keys of the
    parameter that was wrapped first contain base_layer.
    """
    wrapped = [p for p in _EXPERTS if any(x.rpartition(".")[2] == p for x in parameters)]
    places = [re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_A\.weight", x) for x in wanted]
    n_experts = 1 + max((int(place[2]) for place in places if place), default=-1)
    found = {}
    for place, (depth, parameter) in product(filter(None, places), enumerate(wrapped[::-1])):
        a, b = (f"{place[1]}{'.base_layer' * depth}.lora_{kind}.weight" for kind in "AB")
        layers, key = _EXPERTS[parameter], place[0].removesuffix("A.weight")
        if place[3] in layers and a in stored and b in stored:
            rank, n_rows = stored[a][0] // n_experts, stored[b][0] // len(layers)
            expert, first_row = int(place[2]), layers.index(place[3]) * n_rows
            own = slice(expert * rank, (expert + 1) * rank)
            found[f"{key}A.weight"] = _Stored(a, (rank, stored[a][1]), (own,))
            rows = slice(first_row, first_row + n_rows)
            cut = rows, slice(expert, None, n_experts)
            found[f"{key}B.weight"] = _Stored(b, (n_rows, rank), cut)
    return found


def _differences(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> Iterable[str]:
    short = {name.removeprefix(_PREFIX): name for name in saved}
    if more := sorted(name for name, key in short.items() if key not in wanted):
        yield f"the model has no {shorten(more)}; set lora.target_modules and lora.also_train to fit"
    if missing := sorted(key.removeprefix(_PREFIX) for key in wanted if key not in saved):
        yield f"the file has no {shorten(missing)}; set lora.target_modules and lora.also_train to fit"
    for key, shape in wanted.items():
        if saved[key] == shape:
            continue
        name, rank_dim = key.removeprefix(_PREFIX), 1 if ".lora_B." in key else 0
        is_adapter = ".lora_" in key and len(saved[key]) == 2
        if is_adapter and saved[key][1 - rank_dim] == shape[1 - rank_dim]:
            yield (
                f"{name} has rank {saved[key][rank_dim]} in the file and {shape[rank_dim]} in the model; "
                "set lora.rank or lora.rank_pattern to the file's (peft for transformers 5 joins the "
                "gate and up of an expert, with twice their rank and alpha)"
            )
        yield (
            f"{name} is {list(saved[key])} in the file and {list(shape)} in the model: the adapters "
            "are of another base model; take that base"
        )


def _other_scales(
    layers: Mapping[str, _Layer],
    config: Mapping[str, Any],
    of_experts: Collection[str],
    folder: str,
) -> Iterable[str]:
    """Yield a message for each layer whose rank or scale in the config differs from the model's."""
    fused = {part: p for p, parts in _EXPERTS.items() for part in parts}
    names = [
        re.sub(r"(?<=\.experts)\.\d+\.(\w+)$", lambda x: f".{fused[x[1]]}", layer)
        if f"{_PREFIX}{layer}.lora_A.weight" in of_experts
        else layer
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
                f"compared with the names of the layers: {error}; write names of layers there"
            ) from None
        return [default if pattern is None else regexes[pattern] for pattern in found]

    saved = zip(
        layers.items(),
        values("rank", config.get("r", 8)),
        values("alpha", config.get("lora_alpha", 8.0)),
        strict=True,
    )
    for (layer, (rank, scale)), saved_rank, alpha in saved:
        if saved_rank != rank:
            yield f"{layer} has rank {rank} in the file, but the config says {saved_rank}; correct it"
        divisor = rank**0.5 if config.get("use_rslora") else rank
        if abs(alpha / divisor - scale) > 1e-6 * scale:
            yield (
                f"{layer} is scaled by {alpha / divisor:g} in the file and by {scale:g} in the "
                f"model; set lora.alpha = {alpha:g} and lora.use_rslora = "
                f"{str(bool(config.get('use_rslora'))).lower()}"
            )


def _fill(parameter: Tensor, whole: Tensor) -> None:
    if is_dtensor(parameter):
        shape, offsets = local_shape_and_offsets(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        whole = whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]
    local_tensor(parameter).copy_(whole)
