"""Adapters in the files of the library `peft`: adapter_model.safetensors beside adapter_config.json.

M is the name of a layer in Hugging Face's model. A [r, K] and B [N, r] of layer M are stored as
base_model.model.M.lora_A.weight and base_model.model.M.lora_B.weight, and a trained bias of M as
base_model.model.M.base_layer.bias. Other parameters that train whole are stored as
base_model.model.<name>. Rows of B have the order of the rows of Hugging Face's weight. Files have one
layer per expert; `_fused_experts` also reads the fused experts of `peft` for transformers 5. That
release converts files with one layer per expert to its fused format, using what `config_of` writes.

If M joins the rows of several of our weights, the A of M stacks the A's of these weights, and the B is
block-diagonal: [B1 0; 0 B2] [A1; A2]. In adapters that `peft` trained, the joined weights share one A, and
each of our weights gets a copy of it.
"""

import copy
import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchtitan.adapters.lora import Adapted, adapted_weights, adapter_names
from torchtitan.adapters.peft_config import (
    CONFIG_FILE,
    EXPERTS,
    Layer,
    PeftOptions,
    config_of,
    other_scales,
    read_config,
)
from torchtitan.distributed.dtensor import local_tensor, own_slices, whole_tensor
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero, on_all_ranks
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, shorten
from torchtitan.tools.files import (
    hash_file,
    regular_file,
    save_tensors,
    whole_file,
)
from torchtitan.tools.logging import logger

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class _Stored(NamedTuple):
    """A matrix in a file. cut: slices that select it from the stored tensor, which may hold all experts."""

    key: str
    shape: tuple[int, ...]
    cut: tuple[slice, ...] = ()


class _Target(NamedTuple):
    """Layers of Hugging Face's model with the adapters of our weights.

    layers: one layer, or one per expert. weights: our weights whose rows the layer joins, usually one.
    adapted: the adapters of those weights that have one, in the order of `weights`.
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
    adapter = copy.copy(adapter)  # a conversion changes the state-dict adapter
    adapted = list(adapted_weights(parts))
    in_adapters = adapter_names(adapted)
    whole = [name for name in trained if name not in in_adapters]
    targets = _targets_of(adapted, entries, adapter)
    tensors, layers, keys = _tensors_of(targets, whole, entries, adapter, options.rank)
    for name, other in adapter.hf_aliases().items():
        if name in keys:  # PEFT's files hold tied weights twice
            keys[other] = _PREFIX + other
            tensors[keys[other]] = tensors[keys[name]].clone()

    # Pipeline stages have different tensors. The first rank that has a tensor sends it.
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    sent = {name for earlier in all_ranks(sorted(tensors))[:rank] for name in earlier}
    own = {name: t.contiguous().cpu() for name, t in tensors.items() if name not in sent}
    everything = {name: tensor for part in all_ranks(own) for name, tensor in part.items()}
    matrices = [name for name, t in entries.items() if t.ndim > 1 and name not in in_adapters]
    groups = adapter.groups_of(matrices)
    hf_matrices = [hf for names in groups for hf in _hf_layers(names, entries, adapter)]
    of_ranks = all_ranks((layers, hf_matrices, list(keys)))
    all_layers = {name: layer for part, _, _ in of_ranks for name, layer in part.items()}
    known, names = ({name for part in of_ranks for name in part[i]} for i in (1, 2))
    is_tied = getattr(getattr(adapter, "model_args", None), "enable_weight_tying", False)
    config = config_of(all_layers, known, names, options, is_tied)

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, WEIGHTS_FILE)
        with whole_file(path) as weights:  # appears last: a folder that has it is complete
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


def _tensors_of(
    targets: Iterable[_Target],
    whole: Iterable[str],
    entries: Mapping[str, Any],
    adapter: BaseStateDictAdapter,
    rank: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Layer], dict[str, str]]:
    """Return {key in the file: tensor}, {HF layer: its adapter} and, for `whole`, {HF name: key in the file}.

    whole: our names of the parameters that train whole. entries: may be on the meta device if only shapes are
    wanted. rank: see `PeftOptions`.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Layer] = {}
    for target in targets:
        scale = target.adapted[0].scale
        pairs = {
            one.weight: (
                whole_tensor(entries[one.a])[..., :rank, :],
                whole_tensor(entries[one.b])[..., :rank] * (one.scale / scale),
            )
            for one in target.adapted
        }
        a = torch.cat([a for a, _ in pairs.values()], dim=-2)
        blocks, first = {}, 0
        for name in target.weights:
            n_rows = entries[name].shape[-2]
            blocks[name] = a.new_zeros(*a.shape[:-2], n_rows, a.shape[-2])
            if name in pairs:
                b = pairs[name][1]
                blocks[name][..., first : first + b.shape[-1]] = b
                first += b.shape[-1]
        # B's rows are the weight's rows, which the state-dict adapter may reorder; A's rows are not.
        b_parts = adapter.to_hf(blocks).values()
        a_parts = a.unbind() if a.ndim == 3 else [a]
        for layer, a_part, b_part in zip(target.layers, a_parts, b_parts, strict=True):
            layers[layer] = Layer(a_part.shape[0], scale)
            tensors |= {_matrix(layer, "A"): a_part, _matrix(layer, "B"): b_part}
    keys = {}
    for hf_name, tensor in adapter.to_hf(
        {name: whole_tensor(entries[name]) for name in whole}
    ).items():
        layer, _, kind = hf_name.rpartition(".")
        is_inside = kind == "bias" and layer in layers
        keys[hf_name] = _PREFIX + (f"{layer}.base_layer.bias" if is_inside else hf_name)
        tensors[keys[hf_name]] = tensor
    return tensors, layers, keys


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
            f"PEFT's files have no place for the adapter of {shorten(missing)}: it is not a linear layer in "
            "Hugging Face's model; leave it out of lora.target_modules, or write merged weights with save_hf"
        )
    return targets


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
    # The files may have the names of the text model alone, or the names of the multimodal model.
    adapter = adapter.for_export([key.removeprefix(_PREFIX) for key in stored])
    adapted = list(adapted_weights(parts))
    targets = _targets_of(adapted, entries, adapter)
    in_adapters = adapter_names(adapted)
    whole = {name: entries[name] for name in trained if name not in in_adapters}
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in entries.items()}
    in_file, own, keys = _tensors_of(targets, whole, shapes, adapter)
    wanted = {key: tuple(tensor.shape) for key, tensor in in_file.items()}
    for target in targets:
        key_a, key_b = (_matrix(target.layers[0], kind) for kind in "AB")
        (rank, *others) = {entries[one.a].shape[-2] for one in target.adapted}
        if not others and stored.get(key_a, wanted[key_a])[0] != wanted[key_a][0]:
            # The joined weights share one A.
            own[target.layers[0]] = Layer(rank, target.adapted[0].scale)
            wanted |= {key_a: (rank, *wanted[key_a][1:]), key_b: (*wanted[key_b][:-1], rank)}
    # Keys of redundant tensors in peft's files -> the key or tensor that each must equal: tied weights
    # under their second name, and the frozen weight of an output projection that has an adapter.
    copies: dict[str, Any] = {
        _PREFIX + other: _PREFIX + name
        for name, other in adapter.hf_aliases().items()
        if name in keys
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
                        f"{key.removeprefix(_PREFIX)}; train or save the adapter again"
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
        local_tensor(parameter).copy_(tensor[own_slices(parameter)])
    logger.info(f"Read the adapters of {len(targets)} layers from {folder}")


def _parts_of(
    target: _Target, entries: Mapping[str, Any], a: Tensor, blocks: Mapping[str, Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield our parameters of an HF layer, each with its new value.

    a: the layer's A. blocks: our weight -> the rows of the layer's B that belong to this weight.
    Raises ValueError if our adapters cannot represent the layer's adapter.
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
            f"The adapter of {target.layers[0]} has rank {a.shape[-2]} and joins {len(blocks)} weights. The "
            f"model's adapters cannot hold {shorten(others)}; add "
            f"{target.layers[0].rpartition('.')[2]} to lora.target_modules, and set lora.rank or "
            f"lora.rank_pattern to {a.shape[-2]}"
        )


def _read_headers(folder: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config, and key -> shape of the weights file. Raises if ranks have different files."""
    paths = [os.path.join(folder, name) for name in (WEIGHTS_FILE, CONFIG_FILE)]
    headers = from_rank_zero(lambda: (read_config(folder), _shapes_in(paths[0])))
    hashes = on_all_ranks(lambda: list(map(hash_file, paths)))
    if others := [rank for rank, other in enumerate(hashes) if other != hashes[0]]:
        raise ValueError(
            f"The files in {folder} differ between rank 0 and ranks {others}; give all ranks the same"
        )
    return headers


def _matching(
    stored: dict[str, tuple[int, ...]],
    wanted: dict[str, tuple[int, ...]],
    layers: Mapping[str, Layer],
    config: Mapping[str, Any],
    folder: str,
) -> dict[str, _Stored]:
    """Return key -> matrix in the file. Collective.

    ValueError if keys or shapes differ from all ranks' `wanted`, or LoRA ranks or scales from `layers`.
    """
    all_wanted = {key: shape for part in all_ranks(wanted) for key, shape in part.items()}
    of_experts = _fused_experts(stored, all_wanted, config.get("target_parameters") or ())
    fused = {matrix.key for matrix in of_experts.values()}
    matrices = {key: _Stored(key, shape) for key, shape in stored.items() if key not in fused}
    matrices |= of_experts
    shapes = {key: matrix.shape for key, matrix in matrices.items()}
    problem = next(iter(_differences(shapes, all_wanted)), None)
    in_fused = {layer for layer in layers if _matrix(layer, "A") in of_experts}
    scales = on_all_ranks(lambda: next(iter(other_scales(layers, config, in_fused, folder)), None))
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
                f"{path} has a {key.removeprefix(_PREFIX)} that differs from the model's "
                "tied or frozen weight; untie the base, or merge with peft"
            )


def _shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    if not os.path.exists(path):
        raise ValueError(
            f"There is no file {path}; give the folder that save_pretrained or save_peft wrote. Files that "
            "end in .bin are not read, because reading a pickle can run code; load the folder with peft and "
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
    wrapped = [p for p in EXPERTS if any(x.rpartition(".")[2] == p for x in parameters)]
    places = [re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_A\.weight", x) for x in wanted]
    n_experts = 1 + max((int(place[2]) for place in places if place), default=-1)
    found = {}
    for place, (depth, parameter) in product(filter(None, places), enumerate(wrapped[::-1])):
        a, b = (f"{place[1]}{'.base_layer' * depth}.lora_{kind}.weight" for kind in "AB")
        layers, key = EXPERTS[parameter], place[0].removesuffix("A.weight")
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
            "belong to another base model; load that base model"
        )
