"""Seeded faults: separators, masks, kernels and decoders that let documents see each other.

Each is a mistake that somebody made or could make. The certificate of `certificate.py` has to
catch every one of them; otherwise its word is worth little.

B rows, T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.isolation.certificate import (
    Certificate,
    Subject,
    attend_dense,
    certify,
    dense_document_mask,
    ids_of_batch,
)
from tests.isolation.packings import EOS_ID
from torchtitan.batch.documents import PADDING, document_starts
from torchtitan.batch.mask import DocumentMask, VarlenMetadata
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.testing.isolation import AttentionFunction

Batch = dict[str, Tensor]


def packings_until_caught(
    make_subject: Callable[[], Subject], max_packings: int = 60, seed: int = 0
) -> int | None:
    """How many random packings it took to catch a fault; None if all passed."""
    certificate = Certificate(make_subject())
    certify(
        certificate, max_packings, seed=seed, decoder_every=1, report_every_seconds=float("inf")
    )
    return certificate.tally.packings if certificate.tally.failures else None


# ---- separators ----


def _number(is_start: Tensor) -> Tensor:
    """Ids that go up by one where `is_start` [B, T]."""
    return is_start.int().cumsum(dim=1)


def _eos_opens_a_document(batch: Batch, attn_mask_type: str) -> Tensor:
    if len(batch) > 1:
        return ids_of_batch(batch, attn_mask_type)
    return _number(batch["input"] == EOS_ID)


def _eos_read_whatever_the_batch_says(batch: Batch, attn_mask_type: str) -> Tensor:
    return ids_of_batch({"input": batch["input"]}, "block_causal")


def _documents_begin_at_position_0_only(batch: Batch, attn_mask_type: str) -> Tensor:
    if "positions" not in batch:
        return ids_of_batch(batch, attn_mask_type)
    ids = _number(batch["positions"] == 0)
    return ids.masked_fill(batch["positions"] < 0, PADDING)


def _equal_positions_are_padding(batch: Batch, attn_mask_type: str) -> Tensor:
    """Documents of one token, 0 0 0, pass for one stretch."""
    if "positions" not in batch:
        return ids_of_batch(batch, attn_mask_type)
    positions = batch["positions"]
    step = positions[:, 1:] - positions[:, :-1]
    is_start = F.pad((step != 1) & (step != 0), (1, 0), value=True)
    return _number(is_start).masked_fill(positions < 0, PADDING)


def _padding_reads_as_a_predecessor(batch: Batch, attn_mask_type: str) -> Tensor:
    """Position -1 followed by 0 goes up by one."""
    if "positions" not in batch:
        return ids_of_batch(batch, attn_mask_type)
    positions = batch["positions"]
    is_start = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    return _number(is_start)


def _first_row_for_all(batch: Batch, attn_mask_type: str) -> Tensor:
    ids = ids_of_batch(batch, attn_mask_type)
    return ids[:1].expand_as(ids)


def _rows_one_off(batch: Batch, attn_mask_type: str) -> Tensor:
    return ids_of_batch(batch, attn_mask_type).roll(1, dims=0)


def _columns_moved(batch: Batch, attn_mask_type: str, by: int) -> Tensor:
    """Boundaries too late (by 1) or too early (by -1)."""
    ids = ids_of_batch(batch, attn_mask_type)
    starts = document_starts(ids)
    moved = starts.roll(by, dims=1)
    edge = 0 if by > 0 else -1
    moved[:, edge] = starts[:, edge]
    return moved


def _last_document_joins_the_one_before(batch: Batch, attn_mask_type: str) -> Tensor:
    starts = document_starts(ids_of_batch(batch, attn_mask_type))
    last = starts[:, -1:]
    before = starts.gather(1, (last - 1).clamp(min=0).long())
    return torch.where(starts == last, before, starts)


def _returning_ids_are_merged(batch: Batch, attn_mask_type: str) -> Tensor:
    """Sorted out as if equal ids were one document: here, numbers cut to one bit."""
    ids = ids_of_batch(batch, attn_mask_type)
    return ids.bitwise_right_shift(1)


class _IdsOfTheBatchBefore:
    def __init__(self) -> None:
        self.previous: Tensor | None = None

    def __call__(self, batch: Batch, attn_mask_type: str) -> Tensor:
        ids = ids_of_batch(batch, attn_mask_type)
        stale, self.previous = self.previous, ids
        return ids if stale is None or stale.shape != ids.shape else stale


class _IdsOfTheFirstBatchOfAShape:
    """A cache whose key is the shape."""

    def __init__(self) -> None:
        self.by_shape: dict[torch.Size, Tensor] = {}

    def __call__(self, batch: Batch, attn_mask_type: str) -> Tensor:
        ids = ids_of_batch(batch, attn_mask_type)
        return self.by_shape.setdefault(ids.shape, ids)


# ---- masks, written out densely ----


def _attend_with(
    allowed: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """allowed: bool, broadcastable to [B, H, T, T]. Returns [B, T, H, D]."""
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _masked(make_mask: Callable[[Tensor], Tensor]) -> AttentionFunction:
    """A kernel that obeys a mask made from document ids [B, T]."""
    return lambda q, k, v, ids: _attend_with(make_mask(ids), q, k, v)


def _causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def _same_id(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :]).unsqueeze(1)


def _causal_or_same_document(ids: Tensor) -> Tensor:
    return _causal(ids) | dense_document_mask(ids)


def _not_causal(ids: Tensor) -> Tensor:
    allowed = dense_document_mask(ids)
    return allowed | allowed.transpose(-2, -1)


def _transposed(ids: Tensor) -> Tensor:
    return dense_document_mask(ids).transpose(-2, -1)


def _one_key_ahead(ids: Tensor) -> Tensor:
    """The last token's key belongs to a later one: off by one along keys."""
    allowed = dense_document_mask(ids)
    return allowed | allowed.roll(1, dims=-1).tril(1)


def _own_key_left_out(ids: Tensor) -> Tensor:
    allowed = dense_document_mask(ids).tril(-1)
    alone = ~allowed.any(dim=-1, keepdim=True)
    return allowed | (alone & torch.eye(ids.shape[1], dtype=torch.bool))


def _padding_sees_padding(ids: Tensor) -> Tensor:
    is_padding = ids == PADDING
    both = (is_padding[:, :, None] & is_padding[:, None, :]).unsqueeze(1)
    return dense_document_mask(ids) | (both & _causal(ids))


def _padding_is_seen(ids: Tensor) -> Tensor:
    return dense_document_mask(ids) | ((ids == PADDING)[:, None, None, :] & _causal(ids))


def _padding_sees_everything(ids: Tensor) -> Tensor:
    return dense_document_mask(ids) | ((ids == PADDING)[:, None, :, None] & _causal(ids))


def _rounded_to_blocks(ids: Tensor, block_size: int = 4) -> Tensor:
    """Whole key blocks are visible as soon as one key of theirs is."""
    n_tokens = ids.shape[1]
    padding = -n_tokens % block_size
    allowed = F.pad(dense_document_mask(ids), (0, padding)).unflatten(-1, (-1, block_size))
    whole = allowed.any(dim=-1).repeat_interleave(block_size, dim=-1)
    return whole[..., :n_tokens] & _causal(ids)


def _by_position(ids: Tensor) -> Tensor:
    """A query sees whatever stands at no later position, of any document."""
    starts = document_starts(ids)
    position = torch.arange(ids.shape[1]) - starts
    return (position[:, :, None] >= position[:, None, :]).unsqueeze(1) & _causal(ids)


def _of_another_row(ids: Tensor) -> Tensor:
    return dense_document_mask(ids).roll(1, dims=0)


def _neighbouring_documents(ids: Tensor) -> Tensor:
    starts = document_starts(ids)
    before = starts.gather(1, (starts - 1).clamp(min=0).long())
    column = torch.arange(ids.shape[1])
    return ((column <= column[:, None]) & (column >= before[:, :, None])).unsqueeze(1)


# ---- kernels ----


def _first_head_only(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The mask has a head axis that was meant to be broadcast."""
    allowed = _causal(ids).repeat(len(ids), q.shape[1], 1, 1)
    allowed[:, :1] = dense_document_mask(ids)
    return _attend_with(allowed, q, k, v)


def _heads_repeated_in_the_wrong_order(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return attend_dense(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), ids)


def _scale_wrong_for_the_second_document(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    starts = document_starts(ids)
    nth = _number(F.pad(starts[:, 1:] != starts[:, :-1], (1, 0)))
    return attend_dense(torch.where((nth == 1)[:, None, :, None], q * 1.1, q), k, v, ids)


def _additive_mask_of_minus_4(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """A "large negative number" that is not."""
    bias = torch.where(dense_document_mask(ids), 0.0, -4.0)
    bias = bias.masked_fill(~_causal(ids), float("-inf"))
    return _attend_with(bias, q, k, v)


def _gradient_leaks(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, through: str) -> Tensor:
    """The right output; one of the three gradients is that of plain causal attention."""
    tensors = {"q": q, "k": k, "v": v}
    stopped = {name: x.detach() for name, x in tensors.items()}
    right = attend_dense(**(tensors | {through: stopped[through]}), document_ids=ids)
    leaky = _attend_with(_causal(ids), **(stopped | {through: tensors[through]}))
    return right + leaky - leaky.detach()


def _gradient_of_lone_tokens_dropped(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    starts = document_starts(ids)
    is_start = F.pad(starts[:, 1:] != starts[:, :-1], (1, 0), value=True)
    is_alone = is_start & F.pad(is_start[:, 1:], (0, 1), value=True)
    out = attend_dense(q, k, v, ids)
    return torch.where(is_alone[:, :, None, None], out.detach(), out)


def _flex_with_a_causal_mask(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    mask = DocumentMask.of_rows(*ids.shape, q.device)
    return attend(build_inner_attention("flex"), q, k, v, mask)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Variable-length attention with cumulative lengths that somebody changed."""
    metadata = DocumentMask.of_documents(ids).lower("varlen").lowered
    changed = change(metadata.cu_seq_q)
    metadata = VarlenMetadata(changed, changed, metadata.max_q, metadata.max_k)
    return attend(build_inner_attention("varlen"), q, k, v, metadata)


def _without_row_boundaries(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Ids counted in each row, rows laid end to end: a row's 0 follows the 0 of a row before."""
    flat = (ids - ids[:, :1]).flatten()[None]
    return _varlen(q, k, v, flat, change=lambda cu_seqlens: cu_seqlens)


def _boundary_moved(cu_seqlens: Tensor, by: int) -> Tensor:
    """The inner boundaries one token too late or too early, as far as they stay in order."""
    moved = cu_seqlens.clone()
    moved[1:-1] = (moved[1:-1] + by).clamp(0, int(cu_seqlens[-1]))
    return moved


def _without_last_boundary(cu_seqlens: Tensor) -> Tensor:
    return torch.cat((cu_seqlens[:-2], cu_seqlens[-1:])) if len(cu_seqlens) > 2 else cu_seqlens


# ---- decoders ----


def _second_layer_ignores_the_mask(decoder: nn.Module) -> None:
    attention = decoder.layers["1"].attention
    forward = attention.forward

    def ignoring(x: Tensor, rope: Tensor, attention_masks=None) -> Tensor:
        return forward(x, rope, DocumentMask.of_rows(*x.shape[:2], x.device))

    attention.forward = ignoring


def _norm_over_the_row(decoder: nn.Module) -> None:
    """Statistics of all tokens instead of each: nothing that a mask could stop."""

    def normalise(x: Tensor) -> Tensor:
        return x / x.square().mean(dim=(1, 2), keepdim=True).sqrt()

    decoder.norm.forward = normalise


def _feed_forward_sees_the_token_before(decoder: nn.Module) -> None:
    feed_forward = decoder.layers["0"].feed_forward
    forward = feed_forward.forward
    feed_forward.forward = lambda x: forward(x + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1])


def _positions_backwards(decoder: nn.Module) -> None:
    forward = decoder.forward

    def backwards(tokens: Tensor, attention_masks=None, positions=None) -> Tensor:
        if positions is not None:
            positions = positions.flip(1)
        return forward(tokens, attention_masks, positions)

    decoder.forward = backwards


# ---- the table ----

_SEPARATORS: dict[str, Callable[[], Callable[[Batch, str], Tensor]]] = {
    "the end-of-text token opens a document": lambda: _eos_opens_a_document,
    "end-of-text tokens are read whatever the batch says": lambda: (
        _eos_read_whatever_the_batch_says
    ),
    "documents begin at position 0 only": lambda: _documents_begin_at_position_0_only,
    "documents of one token pass for padding": lambda: _equal_positions_are_padding,
    "padding goes over into the document behind it": lambda: _padding_reads_as_a_predecessor,
    "boundaries of the first row for all rows": lambda: _first_row_for_all,
    "boundaries of another row": lambda: _rows_one_off,
    "boundaries a token too late": lambda: partial(_columns_moved, by=1),
    "boundaries a token too early": lambda: partial(_columns_moved, by=-1),
    "the last document joins the one before": lambda: _last_document_joins_the_one_before,
    "neighbours fall into one number": lambda: _returning_ids_are_merged,
    "boundaries of the batch before": _IdsOfTheBatchBefore,
    "boundaries kept by shape": _IdsOfTheFirstBatchOfAShape,
}

_KERNELS: dict[str, AttentionFunction] = {
    "mask argument dropped": _masked(_causal),
    "mask argument dropped, flex": _flex_with_a_causal_mask,
    "causal or same document, instead of and": _masked(_causal_or_same_document),
    "not causal": _masked(_not_causal),
    "not causal, equal ids anywhere": _masked(_same_id),
    "mask transposed": _masked(_transposed),
    "keys one ahead": _masked(_one_key_ahead),
    "own key left out": _masked(_own_key_left_out),
    "padding sees padding": _masked(_padding_sees_padding),
    "padding is seen": _masked(_padding_is_seen),
    "padding sees everything before it": _masked(_padding_sees_everything),
    "mask rounded to blocks": _masked(_rounded_to_blocks),
    "mask by position, not by document": _masked(_by_position),
    "mask of another row": _masked(_of_another_row),
    "the document before is visible": _masked(_neighbouring_documents),
    "mask for the first head only": _first_head_only,
    "key heads repeated in the wrong order": _heads_repeated_in_the_wrong_order,
    "scale wrong for one document": _scale_wrong_for_the_second_document,
    "masked by adding -4": _additive_mask_of_minus_4,
    "gradient of queries leaks": partial(_gradient_leaks, through="q"),
    "gradient of keys leaks": partial(_gradient_leaks, through="k"),
    "gradient of values leaks": partial(_gradient_leaks, through="v"),
    "no gradient for documents of one token": _gradient_of_lone_tokens_dropped,
    "rows run into each other, varlen": _without_row_boundaries,
    "cumulative lengths one too late": partial(_varlen, change=partial(_boundary_moved, by=1)),
    "cumulative lengths one too early": partial(_varlen, change=partial(_boundary_moved, by=-1)),
    "last cumulative length lost": partial(_varlen, change=_without_last_boundary),
}

_DECODERS: dict[str, Callable[[nn.Module], None]] = {
    "decoder: the second layer ignores the mask": _second_layer_ignores_the_mask,
    "decoder: a norm over the row": _norm_over_the_row,
    "decoder: the feed-forward sees the token before": _feed_forward_sees_the_token_before,
    "decoder: positions in the wrong order": _positions_backwards,
}


def _subjects() -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Makers, as some faults remember what they saw."""
    kernel = {"sdpa": attend_dense}
    for name, make_reader in _SEPARATORS.items():
        yield name, lambda make=make_reader: Subject(document_ids=make())
    for name, attention in _KERNELS.items():
        yield name, lambda attention=attention: Subject(kernels={"under test": attention})
    for name, prepare in _DECODERS.items():
        yield name, lambda prepare=prepare: Subject(kernels=kernel, prepare_decoder=prepare)


FAULTS: dict[str, Callable[[], Subject]] = dict(_subjects())
"""What each fault does -> a function that makes a subject with it."""
