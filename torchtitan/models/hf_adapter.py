"""Renaming tensors between a decoder and Hugging Face files by a table.

A name is written as a template, `model.layers.{}.mlp.up_proj.weight`, with `{}` for each number.
"""

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def to_template(name: str) -> tuple[str, list[str]]:
    """Return the name with `{}` for its numbers, and the numbers."""
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)


def dense_hf_key_map(biased: Collection[str] = ()) -> dict[str, str | None]:
    """Return the table for files that are laid out like Llama's: HF template -> ours.

    biased: those of `HF_LINEARS` that have a bias.
    """
    table: dict[str, str | None] = {
        "model.embed_tokens.weight": TOK_EMBEDDINGS,
        "model.norm.weight": "norm.weight",
        HF_OUTPUT: OUTPUT,
        "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
        # Old files carry this table; it follows from the config.
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
    }
    for hf, ours in HF_LINEARS.items():
        table[f"model.layers.{{}}.{hf}.weight"] = f"layers.{{}}.{ours}.weight"
        if hf in biased:
            table[f"model.layers.{{}}.{hf}.bias"] = f"layers.{{}}.{ours}.bias"
    return table


class KeyMapAdapter(StateDictAdapter):
    """One HF tensor for each of ours, renamed by `from_hf_map`.

    from_hf_map: HF template -> our template, or None for what is left out on reading.
    Tied models: files hold no output weight; on reading it is the embedding's very tensor.
    """

    from_hf_map: dict[str, str | None]

    def tensor_to_hf(self, template: str, tensor: Tensor) -> Tensor:
        """Change the layout of one of our tensors into HF's; `template` is our name of it."""
        return tensor

    def tensor_from_hf(self, template: str, tensor: Tensor) -> Tensor:
        """The inverse of `tensor_to_hf`; `template` is our name of it, too."""
        return tensor

    @property
    def _is_tied(self) -> bool:
        return getattr(self.model_args, "enable_weight_tying", False)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """HF name -> tensor. Raises ValueError that lists the keys without an HF name."""
        to_hf_map = {ours: hf for hf, ours in self.from_hf_map.items() if ours is not None}
        _check_all_known(state_dict, to_hf_map, "the model's state dict")
        hf_state_dict = {}
        for name, tensor in state_dict.items():
            if self._is_tied and name == OUTPUT:
                continue
            template, numbers = to_template(name)
            hf_name = to_hf_map[template].format(*numbers)
            hf_state_dict[hf_name] = self.tensor_to_hf(template, tensor)
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our name -> tensor. Raises ValueError that lists the keys that the table lacks."""
        _check_all_known(hf_state_dict, self.from_hf_map, "the Hugging Face weights")
        state_dict = {}
        for hf_name, tensor in hf_state_dict.items():
            hf_template, numbers = to_template(hf_name)
            template = self.from_hf_map[hf_template]
            if template is None or (self._is_tied and hf_name == HF_OUTPUT):
                continue
            state_dict[template.format(*numbers)] = self.tensor_from_hf(template, tensor)
        if self._is_tied and TOK_EMBEDDINGS in state_dict:
            state_dict[OUTPUT] = state_dict[TOK_EMBEDDINGS]
        return state_dict

    def ignores_hf_key(self, hf_key: str) -> bool:
        return super().ignores_hf_key(hf_key) or (self._is_tied and hf_key == HF_OUTPUT)


def _check_all_known(names: Mapping[str, Any], table: Mapping[str, Any], where: str) -> None:
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


def _heads_are_whole(tensor: "DTensor", n_heads: int) -> bool:
    """True if each rank holds whole heads, in order, so that they can be reordered in place."""
    from torch.distributed.tensor import Shard

    split = [(n, p) for n, p in enumerate(tensor.placements) if not p.is_replicate()]
    if any(type(placement) is not Shard for _, placement in split):
        return False
    row_axes = [axis for axis, placement in split if placement.dim == 0]
    return not row_axes or (
        len(row_axes) == 1 and n_heads % tensor.device_mesh.size(row_axes[0]) == 0
    )
