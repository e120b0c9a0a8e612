"""Renaming tensors between a decoder and Hugging Face files by a table.

A name is written as a template, `model.layers.{}.mlp.up_proj.weight`, with `{}` for each number.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.distributed.tensor_views import (
    LocalShard,
    StackLayout,
    as_part_of_rows,
    join_rows,
    split_rows,
    stack,
    swap_rows_and_columns,
    transposed_shard,
    unstack,
    unstacked_shards,
)
from torchtitan.protocols.state_dict_adapter import StateDictAdapter, to_template

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    from torchtitan.protocols.model import BaseModelArgs

HF_OUTPUT = "lm_head.weight"
OUTPUT = "output.weight"
TOK_EMBEDDINGS = "tok_embeddings.weight"

# The linear layers of a block: HF name -> ours.
HF_LINEARS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}

_HF_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}


class Fused(NamedTuple):
    """One HF tensor that holds several of ours, all [E, R, C], one after another in its rows.

    transposed: HF has rows and columns the other way round, [E, C, R].
    """

    ours: tuple[str, ...]
    transposed: bool = False


# Experts behind a router, as Qwen 3 and DeepSeek files have them; the fused names are those that
# transformers 5 has in memory.
HF_EXPERTS: dict[str, str | Fused | None] = {
    "model.layers.{}.mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.moe.experts.w1",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.moe.experts.w3",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.moe.experts.w2",
    "model.layers.{}.mlp.experts.gate_up_proj": Fused(
        ("layers.{}.moe.experts.w1", "layers.{}.moe.experts.w3")
    ),
    "model.layers.{}.mlp.experts.down_proj": "layers.{}.moe.experts.w2",
}


def block_hf_key_map(names: Mapping[str, str], kind: str = "weight") -> dict[str, str]:
    """Return the table for modules in every block: HF template -> ours.

    names: HF's name of a module in its block -> ours. kind: which of its parameters, or "bias".
    """
    return {
        f"model.layers.{{}}.{hf}.{kind}": f"layers.{{}}.{ours}.{kind}" for hf, ours in names.items()
    }


def dense_hf_key_map(biased: Collection[str] = ()) -> dict[str, str | Fused | None]:
    """Return the table for files that are laid out like Llama's: HF template -> ours.

    biased: those of `HF_LINEARS` that have a bias.
    """
    table: dict[str, str | Fused | None] = {
        "model.embed_tokens.weight": TOK_EMBEDDINGS,
        "model.norm.weight": "norm.weight",
        HF_OUTPUT: OUTPUT,
        # Old files carry this table; it follows from the config.
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
    }
    with_bias = {hf: ours for hf, ours in HF_LINEARS.items() if hf in biased}
    return table | block_hf_key_map(_HF_NORMS | HF_LINEARS) | block_hf_key_map(with_bias, "bias")


class KeyMapAdapter(StateDictAdapter):
    """Renames tensors by the table `from_hf_map`, whose entries say what becomes of an HF tensor.

    HF template -> our template. If HF's has a `{}` more, it numbers the entries along dim 0 of
        ours: experts, which lie in files one by one.
    HF template -> Fused, if ours are several or have another layout.
    HF template -> None for what is left out on reading.

    Several HF templates may stand for one of ours: the first is written, each is read.

    optional: templates of ours that HF's side need not have. Without an HF name they stay behind
        on writing, and what the files lack is left as it is on reading.
    ignored_hf_keys: regular expressions for the beginnings of further HF names to leave out.
    rotated_heads: templates of ours -> number of heads, for queries and keys whose rows HF has in
        the order of the other RoPE convention.
    build_quantized_reader: path -> a DCP reader that dequantizes, for families published quantized.

    Sharded models: `to_hf` gives each rank the experts that it holds, as views of its memory, and
        `from_hf` after it takes them back. Tied models: files hold no output weight; on reading
        it is the embedding's very tensor.
    """

    from_hf_map: dict[str, str | Fused | None]
    optional: frozenset[str] = frozenset({"layers.{}.moe.expert_bias"})
    ignored_hf_keys: tuple[str, ...] = ()
    rotated_heads: Mapping[str, int] = {}
    build_quantized_reader: ClassVar[Callable[[str], "HuggingFaceStorageReader"] | None] = None

    def __init__(self, model_args: "BaseModelArgs", hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        # What the last `to_hf` took apart: our name -> its layout.
        self._layouts: dict[str, StackLayout | None] = {}
        # HF templates that the files have; empty: it does not matter.
        self._hf_templates: frozenset[str] = frozenset()

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> "HuggingFaceStorageReader":
        if from_quantized and self.build_quantized_reader is not None:
            return self.build_quantized_reader(path)
        return super().get_hf_storage_reader(path, from_quantized)

    def spelled_like(self, hf_names: Collection[str]) -> "KeyMapAdapter":
        """Return an adapter whose `to_hf` asks for the names that files with these names have."""
        adapter = copy.copy(self)
        adapter._hf_templates = frozenset(to_template(name)[0] for name in hf_names)
        return adapter

    @property
    def _is_tied(self) -> bool:
        return getattr(self.model_args, "enable_weight_tying", False)

    def _to_hf_map(self) -> dict[str, str]:
        """Our template -> HF template, one of possibly several."""
        chosen: dict[str, str] = {}
        there = self._hf_templates
        for hf, entry in self.from_hf_map.items():
            for ours in entry.ours if isinstance(entry, Fused) else filter(None, [entry]):
                if ours not in chosen or (there and hf in there and chosen[ours] not in there):
                    chosen[ours] = hf
        if there:
            missing = {ours for ours in self.optional & chosen.keys() if chosen[ours] not in there}
            chosen = {ours: hf for ours, hf in chosen.items() if ours not in missing}
        return chosen

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        """Tensors by themselves, but for those that are one on HF's side."""
        to_hf_map = self._to_hf_map()
        names = list(names)
        _check_all_known(names, {*to_hf_map, *self.optional}, "the model's state dict")
        groups: dict[str, list[str]] = {}
        for name in names:
            if (hf_template := self._hf_template_of(name, to_hf_map)) is None:
                continue
            is_fused = isinstance(self.from_hf_map[hf_template], Fused)
            key = hf_template.format(*to_template(name)[1]) if is_fused else name
            groups.setdefault(key, []).append(name)
        return list(groups.values())

    def _hf_template_of(self, name: str, to_hf_map: Mapping[str, str]) -> str | None:
        """None for what has no HF name, or none that is written."""
        return None if self._is_tied and name == OUTPUT else to_hf_map.get(to_template(name)[0])

    def hf_aliases(self) -> dict[str, str]:
        if not self._is_tied:
            return {}
        to_hf_map = self._to_hf_map()
        return {to_hf_map[TOK_EMBEDDINGS]: to_hf_map[OUTPUT]}

    def shards_to_hf(self, name: str, shard: LocalShard) -> Iterator[tuple[str, LocalShard]]:
        template, numbers = to_template(name)
        hf_template = self._hf_template_of(name, self._to_hf_map())
        if hf_template is None:
            return
        entry = self.from_hf_map[hf_template]
        if isinstance(entry, Fused):
            joined = as_part_of_rows(shard, entry.ours.index(template), len(entry.ours))
            yield (
                hf_template.format(*numbers),
                transposed_shard(joined) if entry.transposed else joined,
            )
        elif _is_stack(hf_template, template):
            for expert, part in unstacked_shards(shard).items():
                yield hf_template.format(*numbers, expert), part
        elif (n_heads := self.rotated_heads.get(template)) is not None:
            for part in _shards_in_hf_rope_layout(shard, n_heads):
                yield hf_template.format(*numbers), part
        else:
            yield hf_template.format(*numbers), shard

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """HF name -> tensor. Raises ValueError that lists the keys without an HF name."""
        to_hf_map = self._to_hf_map()
        _check_all_known(state_dict, {*to_hf_map, *self.optional}, "the model's state dict")
        self._layouts = {}
        hf_state_dict: dict[str, Any] = {}
        fused: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in state_dict.items():
            template, numbers = to_template(name)
            if (hf_template := self._hf_template_of(name, to_hf_map)) is None:
                continue
            if _is_stack(hf_template, template):
                experts, self._layouts[name] = unstack(tensor)
                for expert, part in experts.items():
                    hf_name = hf_template.format(*numbers, expert)
                    hf_state_dict[hf_name] = self._reorder(template, part, to_hf=True)
                continue
            hf_name = hf_template.format(*numbers)
            tensor = self._reorder(template, tensor, to_hf=True)
            entry = self.from_hf_map[hf_template]
            if not isinstance(entry, Fused):
                hf_state_dict[hf_name] = tensor
                continue
            parts = fused[hf_name]
            parts[template] = tensor
            if len(parts) == len(entry.ours):
                joined = join_rows([parts[ours] for ours in entry.ours])
                hf_state_dict[hf_name] = (
                    swap_rows_and_columns(joined) if entry.transposed else joined
                )
                del fused[hf_name]
        if fused:
            raise ValueError(f"The model's state dict has only a part of {', '.join(fused)}")
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our name -> tensor. Raises ValueError that lists the keys that the table lacks."""
        relevant = {k: t for k, t in hf_state_dict.items() if not self.ignores_hf_key(k)}
        _check_all_known(relevant, self.from_hf_map, "the Hugging Face weights")
        state_dict: dict[str, Any] = {}
        stacks: dict[str, dict[int, Tensor]] = {
            name: {} for name, layout in self._layouts.items() if layout and not layout.rows
        }
        for hf_name, tensor in relevant.items():
            hf_template, numbers = to_template(hf_name)
            entry = self.from_hf_map[hf_template]
            if isinstance(entry, Fused):
                joined = swap_rows_and_columns(tensor) if entry.transposed else tensor
                parts = dict(zip(entry.ours, split_rows(joined, len(entry.ours)), strict=True))
            else:
                parts = {entry: tensor}
            for template, part in parts.items():
                part = self._reorder(template, part, to_hf=False)
                if _is_stack(hf_template, template):
                    *outer, expert = numbers
                    stacks.setdefault(template.format(*outer), {})[int(expert)] = part
                else:
                    state_dict[template.format(*numbers)] = part
        for name, experts in stacks.items():
            state_dict[name] = stack(experts, self._layouts.get(name), name)
        if self._is_tied and TOK_EMBEDDINGS in state_dict:
            state_dict[OUTPUT] = state_dict[TOK_EMBEDDINGS]
        return state_dict

    def _reorder(self, template: str, tensor: Tensor, to_hf: bool) -> Tensor:
        n_heads = self.rotated_heads.get(template)
        return tensor if n_heads is None else swap_rope_layout(tensor, n_heads, to_hf)

    def ignores_hf_key(self, hf_key: str) -> bool:
        return (
            super().ignores_hf_key(hf_key)
            or (self._is_tied and hf_key == HF_OUTPUT)
            or any(re.match(pattern, hf_key) for pattern in self.ignored_hf_keys)
        )


def _is_stack(hf_template: str, template: str) -> bool:
    return hf_template.count("{}") > template.count("{}")


def _check_all_known(names: Iterable[str], table: Collection[str], where: str) -> None:
    unknown = [name for name in names if to_template(name)[0] not in table]
    if unknown:
        raise ValueError(
            f"{len(unknown)} key(s) of {where} have no counterpart in this model family: "
            f"{', '.join(unknown)}; check model.name and model.flavor against the checkpoint"
        )


def swap_rope_layout(tensor: Tensor, n_heads: int, to_hf: bool) -> Tensor:
    """Reorder the rows of a query or key projection between the two RoPE conventions.

    tensor: weight [n_heads * D, M] or bias [n_heads * D], plain or DTensor. Ours has the two
    numbers that turn together as neighbours, HF's has them half a head apart.
    """
    if is_dtensor(tensor) and not _heads_are_whole(tensor, n_heads):
        from torch.distributed.tensor import Replicate

        gathered = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        swapped = swap_rope_layout(gathered, n_heads, to_hf)
        return swapped.redistribute(placements=tensor.placements)
    half = tensor.shape[0] // n_heads // 2
    pair_sizes = (half, 2) if to_hf else (2, half)
    rows = tensor.view(n_heads, *pair_sizes, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)


def _shards_in_hf_rope_layout(shard: LocalShard, n_heads: int) -> Iterator[LocalShard]:
    """The blocks that `swap_rope_layout` to HF makes of a block of rows, two for each head.

    Our rows of a head with even numbers are HF's first half of it, the others the second half.
    """
    n_rows = shard.shape[0] // n_heads
    first, *other_offsets = shard.offsets
    end = first + shard.tensor.shape[0]
    for head in range(first // n_rows * n_rows, end, n_rows):
        begin, stop = max(first, head), min(end, head + n_rows)
        for half in (0, 1):
            row = begin + (half - (begin - head)) % 2
            if row < stop:
                rows = shard.tensor[row - first : stop - first : 2]
                hf_row = head + half * (n_rows // 2) + (row - head) // 2
                yield shard._replace(tensor=rows, offsets=(hf_row, *other_offsets))


def _heads_are_whole(tensor: Tensor, n_heads: int) -> bool:
    """True if each rank holds whole heads, in order, so that they can be reordered in place."""
    from torch.distributed.tensor import Shard

    split = [(n, p) for n, p in enumerate(tensor.placements) if not p.is_replicate()]
    if any(type(placement) is not Shard for _, placement in split):
        return False
    row_axes = [axis for axis, placement in split if placement.dim == 0]
    return not row_axes or (
        len(row_axes) == 1 and n_heads % tensor.device_mesh.size(row_axes[0]) == 0
    )
