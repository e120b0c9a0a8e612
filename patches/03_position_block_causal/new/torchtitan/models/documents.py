"""Packed documents: where one ends and the next begins, and the masks that keep them apart.

A separator turns a batch into document ids [B, T], counted from 0 in each row, with -1 for padding.
Masks and boundaries are made from the ids and do not know which separator they came from.

B rows, T tokens per row.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks

from torchtitan.models.attention import VarlenMetadata, create_attention_mask, get_causal_mask_mod
from torchtitan.tools.logging import logger

PADDING = -1


def ids_from_end_of_text(tokens: Tensor, eos_id: int) -> Tensor:
    """tokens: [B, T]. An end-of-text token belongs to the document it closes: 5 E 7 E 8 -> 0 0 1 1 2."""
    ids = torch.zeros_like(tokens, dtype=torch.int32)
    ids[:, 1:] = (tokens[:, :-1] == eos_id).cumsum(dim=1)
    return ids


def ids_from_positions(positions: Tensor) -> Tensor:
    """positions: [B, T], which go up by one within a document; negative ones are padding.

    A row may begin inside a document, as after a prefill: 4 5 6 0 1 2 3 7 8 -> 0 0 0 1 1 1 1 2 2.
    """
    is_padding = positions < 0
    is_start = torch.ones_like(is_padding)
    is_start[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | is_padding[:, :-1]
    ids = (is_start & ~is_padding).cumsum(dim=1, dtype=torch.int32) - 1
    return ids.masked_fill(is_padding, PADDING)


# Models whose batches were compared, and whose two separators were found to disagree.
_compared: WeakSet[nn.Module] = WeakSet()
_warned: WeakSet[nn.Module] = WeakSet()


def document_ids(
    model: nn.Module, tokens: Tensor, tokenizer: Any, extra_inputs: Mapping[str, Any] | None
) -> Tensor:
    """Return the ids [B, T] by the separator of the model's attn_mask_type.

    "block_causal": the tokenizer's end-of-text id. "position_block_causal": `positions` of
    `extra_inputs`, [B, T] or [T]; no tokenizer is needed.
    Warns once per model if a batch has both and they disagree, and says which one rules.
    Raises ValueError if the batch lacks the separator.
    """
    kind = model.model_args.attn_mask_type
    positions = (extra_inputs or {}).get("positions")
    eos_id = getattr(tokenizer, "eos_id", None)
    by_positions = by_eos = None
    if positions is not None:
        by_positions = ids_from_positions(positions.expand(tokens.shape))
    if eos_id is not None:
        by_eos = ids_from_end_of_text(tokens, eos_id)
    if kind == "position_block_causal":
        ids, other, rules = by_positions, by_eos, "'positions' [B, T] in the batch"
    else:
        ids, other, rules = by_eos, by_positions, "a tokenizer's eos_id"
    if ids is None:
        raise ValueError(
            f"attn_mask_type {kind!r} needs {rules}, got None; give it, or choose another attn_mask_type"
        )
    # A comparison waits for an accelerator, so only its first batch is compared there.
    if other is not None and model not in (_warned if tokens.is_cpu else _compared):
        _compared.add(model)
        both = (ids >= 0) & (other >= 0) & (tokens == eos_id).any(dim=1, keepdim=True)
        disagree = ((starts(ids) != starts(other)) & both).nonzero()
        if len(disagree):
            _warned.add(model)
            row, index = disagree[0].tolist()
            logger.warning(
                f"attn_mask_type {kind!r}: {rules} separates documents; the batch's other separator is "
                f"ignored, and differs first in row {row} at token {index}"
            )
    return ids


def starts(ids: Tensor) -> Tensor:
    """Return the column [B, T] where each token's document begins; padding is a document per token."""
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] == PADDING)
    columns = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(is_start, columns, 0).cummax(dim=1).values


def varlen_metadata(ids: Tensor) -> VarlenMetadata:
    """Return the boundaries for varlen attention, of all rows laid end to end."""
    is_start = starts(ids) == torch.arange(ids.shape[1], device=ids.device)
    begins = is_start.flatten().nonzero().flatten().to(torch.int32)
    boundaries = torch.nn.functional.pad(begins, (0, 1), value=ids.numel())
    longest = int(boundaries.diff().max())
    return VarlenMetadata(boundaries, boundaries, longest, longest)


def attention_masks(
    model: nn.Module, tokens: Tensor, tokenizer: Any, extra_inputs: Mapping[str, Any] | None
) -> BlockMask | VarlenMetadata:
    """Return the mask of a batch for the model's attn_type and attn_mask_type.

    Raises TypeError for an attn_type without masks, ValueError for an attn_mask_type that it lacks.
    """
    kernel, kind = model.model_args.attn_type, model.model_args.attn_mask_type
    if kernel not in ("flex", "varlen"):
        raise TypeError(f"only attn_type 'flex' and 'varlen' have masks, got {kernel!r}")
    known = ("block_causal", "position_block_causal", *(["causal"] if kernel == "flex" else []))
    if kind not in known:
        raise ValueError(f"attn_type {kernel!r} needs attn_mask_type in {known}, got {kind!r}")
    rows, length = tokens.shape
    if kind == "causal":
        mods, rows = [get_causal_mask_mod()], 1
    else:
        ids = document_ids(model, tokens, tokenizer, extra_inputs)
        if kernel == "varlen":
            return varlen_metadata(ids)
        begins = starts(ids)

        def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return begins[b, q_idx] == begins[b, kv_idx]

        mods = [get_causal_mask_mod(), document_mask]
    mask_mod = and_masks(*mods)
    return create_attention_mask(mask_mod, rows, None, length, length, device=tokens.device)
