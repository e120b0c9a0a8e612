"""Converts state dicts between our names and Hugging Face's (HF) by a table of name templates."""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from torchtitan.distributed.dtensor import LocalShard, is_dtensor, load_dtensor
from torchtitan.models.hf_stacks import (
    StackLayout,
    as_parts_of_rows,
    join_rows,
    shard_with_middle,
    split_rows,
    stack,
    transposed_shard,
    unstack,
    unstacked_shards,
)
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter, to_template

HF_OUTPUT = "lm_head.weight"
OUTPUT = "output.weight"
TOK_EMBEDDINGS = "tok_embeddings.weight"
# The value head has the same names in our model and in HF files.
SCORE, SCORE_BIAS = "score.weight", "score.bias"
CORRECTION_BIAS = {"model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias"}

# The norms of a block by `norm_placement`: HF name -> ours.
HF_NORMS = {
    "before": {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    "after": {
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
}


class Fused(NamedTuple):
    """One HF tensor that joins the rows of one or more of our tensors [..., R, C].

    rows: the proportions of the tensors' row counts; empty: all tensors have equally many rows.
    n_groups: see `join_rows`. has_middle: HF's tensor is [R, 1, C], like the weight of a convolution.
    rotated_heads: number of heads, if the rows need `swap_rope_layout`.
    """

    ours: tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, ...] = ()
    n_groups: int = 1
    has_middle: bool = False
    rotated_heads: int | None = None

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return HF's tensor. tensors: our name -> tensor."""
        joined = join_rows([tensors[name] for name in self.ours], self.n_groups)
        if self.rotated_heads is not None:
            joined = swap_rope_layout(joined, self.rotated_heads, to_hf=True)
        joined = joined.unsqueeze(1) if self.has_middle else joined
        return joined.transpose(-2, -1) if self.transposed else joined

    def split(self, joined: Tensor) -> dict[str, Tensor]:
        """The inverse of `join`."""
        joined = joined.transpose(-2, -1) if self.transposed else joined
        joined = joined.squeeze(1) if self.has_middle else joined
        if self.rotated_heads is not None:
            joined = swap_rope_layout(joined, self.rotated_heads, to_hf=False)
        parts = split_rows(joined, self._proportions(), self.n_groups)
        return dict(zip(self.ours, parts, strict=True))

    def shards(self, name: str, shard: LocalShard) -> Iterator[LocalShard]:
        """Yield a shard of our tensor as shards of HF's tensor."""
        parts: Iterable[LocalShard] = [shard]
        if len(self.ours) > 1:
            place = self.ours.index(name)
            parts = as_parts_of_rows(shard, place, self._proportions(), self.n_groups)
        elif self.rotated_heads is not None:
            parts = _shards_in_hf_rope_layout(shard, self.rotated_heads)
        for part in parts:
            part = shard_with_middle(part) if self.has_middle else part
            yield transposed_shard(part) if self.transposed else part

    def _proportions(self) -> tuple[int, ...]:
        return self.rows or (1,) * len(self.ours)


HFKeyMap = dict[str, str | Fused | None]  # see `KeyMapAdapter`

# Names of routers and experts. Files of Qwen 3 and DeepSeek have one tensor per expert; state dicts of
# transformers 5 have the fused tensors at the end of the table.
HF_EXPERTS: HFKeyMap = {
    "model.layers.{}.mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.moe.experts.w1",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.moe.experts.w3",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.moe.experts.w2",
    "model.layers.{}.mlp.experts.gate_up_proj": Fused(
        ("layers.{}.moe.experts.w1", "layers.{}.moe.experts.w3")
    ),
    "model.layers.{}.mlp.experts.down_proj": "layers.{}.moe.experts.w2",
}


def block_hf_key_map(names: Mapping[str, str], *kinds: str) -> HFKeyMap:
    """Return the key map of modules that every block has.

    names: HF's module name -> ours. kinds: the modules' parameters, by default "weight".
    """
    return {
        f"model.layers.{{}}.{hf}.{kind}": f"layers.{{}}.{ours}.{kind}"
        for kind in kinds or ("weight",)
        for hf, ours in names.items()
    }


def feed_forward_names(hf: str, ours: str) -> dict[str, str]:
    """Return HF's name -> ours for the three linear layers of a gated feed-forward."""
    return {
        f"{hf}.{a}_proj": f"{ours}.{b}" for a, b in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    }


def hf_key_map(args: Any) -> HFKeyMap:
    """Return the table of a decoder whose HF names follow Llama's, computed from the decoder's args."""

    def fact(name: str) -> Any:
        return getattr(args, name, False)

    table: HFKeyMap = {
        "model.embed_tokens.weight": TOK_EMBEDDINGS,
        "model.norm.weight": "norm.weight",
        HF_OUTPUT: OUTPUT,
        SCORE: SCORE,
        SCORE_BIAS: SCORE_BIAS,
        # Old files contain RoPE's frequencies, which are computed from the config.
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
    }
    qkv = {f"self_attn.{name}_proj": f"attention.w{name}" for name in "qkv"}
    output, mlp = {"self_attn.o_proj": "attention.wo"}, feed_forward_names("mlp", "feed_forward")
    table |= block_hf_key_map(HF_NORMS[args.norm_placement] | qkv | output | mlp)
    for names, has_bias in (
        (qkv, fact("qkv_bias") or fact("attention_bias")),
        (output, fact("output_bias") or fact("attention_bias")),
        (mlp, fact("mlp_bias")),
    ):
        table |= block_hf_key_map(names, "bias") if has_bias else {}
    if fact("qk_norm"):
        table |= block_hf_key_map({f"self_attn.{n}_norm": f"attention.{n}_norm" for n in "qk"})
    if fact("attention_gate"):
        for kind in ("weight", "bias") if fact("qkv_bias") else ("weight",):
            parts = tuple(f"layers.{{}}.attention.{name}.{kind}" for name in ("wq", "wg"))
            queries = Fused(parts, n_groups=args.n_heads)
            table[f"model.layers.{{}}.self_attn.q_proj.{kind}"] = queries
    if not getattr(args, "moe_enabled", hasattr(args, "moe_args")):
        return table
    table |= HF_EXPERTS
    if args.moe_args.num_shared_experts:
        has_gate = args.moe_args.shared_expert_gate
        # Qwen's models have the gate, and their files use the singular.
        module = "mlp.shared_expert" if has_gate else "mlp.shared_experts"
        table |= block_hf_key_map(feed_forward_names(module, "moe.shared_experts"))
        if has_gate:
            table |= block_hf_key_map({f"{module}_gate": "moe.shared_gate"})
    return table


class KeyMapAdapter(StateDictAdapter):
    """Renames tensors by the table `from_hf_map`. An entry maps an HF template to

        our template. If the HF template has one more `{}`, this `{}` is the index along dim 0 of our
            tensor, because files store one tensor per expert.
        Fused, if the HF tensor joins several of our tensors or is transposed.
        None, if the HF tensor is skipped on reading.

    If several HF templates map to one of our templates, all of them are read and the first one is written.
    A key with numbers in place of `{}` takes precedence over the template.

    optional: our templates that HF files may lack; these tensors then keep their values on reading.
    ignored_hf_keys: regular expressions that match the start of HF names of parts that our model lacks,
        such as vision towers. Layers for multi-token prediction are ignored, too.
    text_prefixes: prefixes of the text model's names in multimodal files, see `name_text_model`.
    rotated_heads: our template -> number of heads, for queries and keys that need `swap_rope_layout`.
    quantized_format: format of the family's published files; see `build_quantized_reader`.

    For a sharded model, `to_hf` returns only this rank's experts, and the next `from_hf` accepts this subset.
    Files of tied models have no output weight; `from_hf` sets it to the embedding's tensor.
    """

    from_hf_map: HFKeyMap
    optional: frozenset[str] = frozenset({"layers.{}.moe.expert_bias", SCORE, SCORE_BIAS})
    ignored_hf_keys: tuple[str, ...] = ()
    text_prefixes: tuple[str, ...] = ()
    rotated_heads: Mapping[str, int] = {}
    quantized_format: Literal["fp8", "mxfp4"] | None = None

    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        # Our name of each tensor that the last `to_hf` split into experts -> the tensor's layout.
        self._layouts: dict[str, StackLayout | None] = {}
        # HF names and templates in the files that will be read; empty if unknown.
        self._hf_templates: frozenset[str] = frozenset()
        self._mtp_layers: tuple[str, ...] = ()  # patterns, as in ignored_hf_keys

    def name_text_model(self, table: HFKeyMap) -> None:
        """Accept names with each of the `text_prefixes`; write names with the prefix that the index file uses.

        table: the table for files of the text model alone. A prefix "model.x." replaces "model."; any other
        prefix is put in front of all names.
        """
        self._text_map = table
        self._prefer(self._prefix_of(self.fqn_to_index_mapping or ()))

    def _prefix_of(self, names: Iterable[str]) -> str:
        return next((p for n in names for p in self.text_prefixes if n.startswith(p)), "")

    def _prefer(self, prefix: str) -> None:
        self.from_hf_map = {}
        # If several HF names stand for one of our tensors, the first is written: put `prefix` first.
        for one in (prefix, "", *self.text_prefixes):
            named = {_with_prefix(one, hf): entry for hf, entry in self._text_map.items()}
            self.from_hf_map = self.from_hf_map | named

    def for_export(self, base_names: Collection[str]) -> "KeyMapAdapter":
        if not self.text_prefixes:
            return self
        adapter = copy.copy(self)
        adapter._prefer(self._prefix_of(base_names))
        index = self.fqn_to_index_mapping or {}
        numbers = {_without_prefix(self._prefix_of([n]), n): number for n, number in index.items()}
        adapter.fqn_to_index_mapping = index | numbers or None
        return adapter

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        if from_quantized and self.quantized_format is not None:
            from torchtitan.models.hf_quantized import build_quantized_reader  # imports DCP

            return build_quantized_reader(path, self.quantized_format)
        return super().get_hf_storage_reader(path, from_quantized)

    def spelled_like(self, hf_names: Collection[str]) -> "KeyMapAdapter":
        adapter = copy.copy(self)
        adapter._hf_templates = frozenset(hf_names) | {to_template(name)[0] for name in hf_names}
        adapter._mtp_layers = _mtp_layers(hf_names)
        return adapter

    _has_value_head = property(lambda self: getattr(self.model_args, "value_head", False))
    _is_tied = property(lambda self: getattr(self.model_args, "enable_weight_tying", False))

    def _to_hf_map(self) -> dict[str, str]:
        """Return our template -> the HF template to write.

        If several HF templates map to one of ours, a template that the files contain is chosen, else the first.
        """
        chosen: dict[str, str] = {}
        in_files = self._hf_templates
        for hf, entry in self.from_hf_map.items():
            for ours in entry.ours if isinstance(entry, Fused) else filter(None, [entry]):
                if ours not in chosen or (hf in in_files and chosen[ours] not in in_files):
                    chosen[ours] = hf
        return {
            ours: hf
            for ours, hf in chosen.items()
            if not in_files or ours not in self.optional or hf in in_files
        }

    def _named_on_both_sides(self, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Yield (our name, its template, HF template) of tensors to write. ValueError for unknown names."""
        to_hf_map, names = self._to_hf_map(), list(names)
        _check_all_known(names, {*to_hf_map, *self.optional}, "the model's state dict")
        for name in names:
            template = _key_of(name, to_hf_map)
            if template in to_hf_map and not (self._is_tied and name == OUTPUT):
                yield name, template, to_hf_map[template]

    def _entry(self, hf_template: str) -> Fused:
        entry = self.from_hf_map[hf_template]
        if isinstance(entry, Fused):
            return entry
        return Fused((entry,), rotated_heads=self.rotated_heads.get(entry))

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name, template, hf_template in self._named_on_both_sides(names):
            is_alone = _is_stack(hf_template, template)
            key = name if is_alone else hf_template.format(*to_template(name)[1])
            groups.setdefault(key, []).append(name)
        return list(groups.values())

    def hf_aliases(self) -> dict[str, str]:
        if not self._is_tied:
            return {}
        to_hf_map = self._to_hf_map()
        return {to_hf_map[TOK_EMBEDDINGS]: to_hf_map[OUTPUT]}

    def shards_to_hf(self, name: str, shard: LocalShard) -> Iterator[tuple[str, LocalShard]]:
        numbers = to_template(name)[1]
        for _, template, hf_template in self._named_on_both_sides([name]):
            if _is_stack(hf_template, template):
                for expert, part in unstacked_shards(shard).items():
                    yield hf_template.format(*numbers, expert), part
                continue
            for part in self._entry(hf_template).shards(template, shard):
                yield hf_template.format(*numbers), part

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return HF name -> tensor. Raises ValueError, which lists the keys without an HF name."""
        self._layouts = {}
        hf_state_dict: dict[str, Any] = {}
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, template, hf_template in self._named_on_both_sides(state_dict):
            numbers = to_template(name)[1]
            if _is_stack(hf_template, template):
                experts, self._layouts[name] = unstack(state_dict[name])
                for expert, part in experts.items():
                    hf_state_dict[hf_template.format(*numbers, expert)] = part
                continue
            hf_name, entry = hf_template.format(*numbers), self._entry(hf_template)
            parts[hf_name][template] = state_dict[name]
            if len(parts[hf_name]) == len(entry.ours):
                hf_state_dict[hf_name] = entry.join(parts.pop(hf_name))
        if parts:
            raise ValueError(
                f"The model's state dict has only some of the tensors that Hugging Face joins in "
                f"{', '.join(parts)}; give all of them"
            )
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our name -> tensor. Raises ValueError, which lists the keys that the table lacks."""
        self._mtp_layers = _mtp_layers(hf_state_dict)
        relevant = {k: t for k, t in hf_state_dict.items() if not self.ignores_hf_key(k)}
        _check_all_known(relevant, self.from_hf_map, "the Hugging Face weights")
        state_dict: dict[str, Any] = {}
        # A rank without experts gets no HF tensors, but has to return its empty shard of the stack.
        stacks: dict[str, dict[int, Tensor]] = {
            name: {} for name, layout in self._layouts.items() if layout and not layout.rows
        }
        for hf_name, tensor in relevant.items():
            hf_template, numbers = _key_of(hf_name, self.from_hf_map), to_template(hf_name)[1]
            entry = self._entry(hf_template)
            if _is_stack(hf_template, entry.ours[0]):
                *outer, expert = numbers
                stacks.setdefault(entry.ours[0].format(*outer), {})[int(expert)] = tensor
                continue
            for ours, part in entry.split(tensor).items():
                state_dict[ours.format(*numbers)] = part
        for name, experts in stacks.items():
            state_dict[name] = stack(experts, self._layouts.get(name), name)
        if self._is_tied and TOK_EMBEDDINGS in state_dict:
            state_dict[OUTPUT] = state_dict[TOK_EMBEDDINGS]
        return state_dict

    def ignores_hf_key(self, hf_key: str) -> bool:
        is_output = self.from_hf_map.get(hf_key) == OUTPUT
        return (
            super().ignores_hf_key(hf_key)
            or (is_output and (self._is_tied or self._has_value_head))
            or self.holds_untrained_part(hf_key)
        )

    def holds_untrained_part(self, hf_key: str) -> bool:
        patterns = (*self.ignored_hf_keys, *self._mtp_layers)
        return any(re.match(pattern, hf_key) for pattern in patterns)


class HFAdapter(KeyMapAdapter):
    """The adapter of a decoder whose HF names follow from its args; the family's `own_names` take precedence."""

    own_names: HFKeyMap = {}

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.name_text_model({**self.own_names, **hf_key_map(model_args), **self.own_names})


def _mtp_layers(hf_names: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match the names of layers for multi-token prediction, one per layer."""
    ends = "eh_proj.weight"
    return tuple(
        re.escape(name.removesuffix(ends)) for name in hf_names if name.endswith(f".{ends}")
    )


def _with_prefix(prefix: str, hf_name: str) -> str:
    if not prefix.startswith("model."):
        return prefix + hf_name
    return prefix + rest if (rest := hf_name.removeprefix("model.")) != hf_name else hf_name


def _without_prefix(prefix: str, hf_name: str) -> str:
    """The inverse of `_with_prefix`."""
    rest = hf_name.removeprefix(prefix)
    return f"model.{rest}" if prefix.startswith("model.") else rest


def _key_of(name: str, table: Collection[str]) -> str:
    """Return the name if the table has it, else the name with {} for each number: `layers.{}.weight`."""
    return name if name in table else to_template(name)[0]


def _is_stack(hf_template: str, template: str) -> bool:
    return hf_template.count("{}") > template.count("{}")


def _check_all_known(names: Iterable[str], table: Collection[str], where: str) -> None:
    unknown = [name for name in names if _key_of(name, table) not in table]
    if unknown:
        raise ValueError(
            f"{len(unknown)} key(s) of {where} have no counterpart in this model family: "
            f"{', '.join(unknown)}; check model.name and model.flavor against the checkpoint"
        )


def swap_rope_layout(tensor: Tensor, n_heads: int, to_hf: bool) -> Tensor:
    """Reorder the rows of a weight [n_heads * D, M] or bias [n_heads * D] for the other RoPE convention.

    The two rows of a RoPE pair are adjacent in our order, and D / 2 rows apart in HF's.
    """
    if is_dtensor(tensor):
        tensor_api = load_dtensor()
        # A rank can reorder its rows without communication only if it holds whole heads.
        mesh, placements = tensor.device_mesh, tensor.placements
        row_ranks = [mesh.size(axis) for axis, p in enumerate(placements) if p.is_shard(0)]
        has_whole_heads = (
            all(p.is_replicate() or type(p) is tensor_api.Shard for p in placements)
            and len(row_ranks) <= 1
            and all(n_heads % ranks == 0 for ranks in row_ranks)
        )
        if not has_whole_heads:
            gathered = tensor.redistribute(placements=[tensor_api.Replicate()] * mesh.ndim)
            swapped = swap_rope_layout(gathered, n_heads, to_hf)
            return swapped.redistribute(placements=placements)
    half = tensor.shape[0] // n_heads // 2
    pair_sizes = (half, 2) if to_hf else (2, half)
    rows = tensor.view(n_heads, *pair_sizes, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)


def _shards_in_hf_rope_layout(shard: LocalShard, n_heads: int) -> Iterator[LocalShard]:
    """Yield a shard of rows as shards in HF's order: in each head, even rows precede odd rows."""
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
