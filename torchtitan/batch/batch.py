"""`TokenBatch`, which a caller's batch becomes when it enters a step. B rows, T tokens per row."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Required, Self, TypeAlias, TypedDict

import torch
from torch import Tensor

from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    PADDING,
    PARENT_IDS,
    SAMPLE_IDS,
    per_token,
)
from torchtitan.tools.host_copy import on_host, to_device

Entries = dict[str, Any]


class Batch(TypedDict, total=False):
    """The batch that a caller passes to the engine; the caller's loss and output functions get it too.

    The model's `get_attention_masks` also gets the entries. The model's forward gets an entry if it has a
    parameter of the same name. Callers declare their own entries in a subclass, for type checkers.

    input: [B, T] token ids. labels: [B, T] token ids, used if the call has no labels of its own.
    positions: [B, T], each token's position in its document.
    attention_masks: an attention kernel's masks, or a padding mask [B, T].
    document_ids [B, T], seq_lens [B, n], cu_seqlens [B, n + 1] or [n + 1]: boundaries of a row's n
        documents, see `batch.documents`.
    parent_ids: [B, T], makes documents branches of trees; see `batch.trees`.
    routed_experts: [B, T, L, k], the k experts that a generator chose in each of L layers; see
        `Decoder.check_routed_experts`.
    """

    input: Required[Tensor]
    labels: Tensor
    positions: Tensor
    attention_masks: Any
    document_ids: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    parent_ids: Tensor
    routed_experts: Tensor


Microbatches: TypeAlias = "Batch | TokenBatch | Sequence[Batch | TokenBatch]"
"""What a caller passes to a step: a batch, or a list of batches."""

# Key of a batch -> its value at padding tokens that are appended to a row; 0 for other keys.
_PADDING_OF = {
    "positions": PADDING,
    "document_ids": PADDING,
    "depths": PADDING,
    PARENT_IDS: PADDING,
    "labels": IGNORE_INDEX,
    "routed_experts": -1,  # the router chooses the experts
}
# Keys that never hold one value per token, whatever their shape.
_LENGTHS = ("seq_lens", "cu_seqlens")


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens, with their labels and the caller's other entries.

    tokens, labels: [B, T]. entries: the caller's other entries, including positions.
    document_ids: [B, T] int32, padding -1; None if attention does not separate documents, or if the
        batch has attention masks of its own. See `DocumentPolicy.token_batch`.
    depths: [B, T] int32, the result of `branch_depths`; None if no document has a parent.
    sample_ids: [B, 2], the first and the last sample in each row, if known.
    has_checked_ids: True if tokens, labels and experts are known to be in the model's ranges.
    """

    tokens: Tensor
    labels: Tensor | None = None
    document_ids: Tensor | None = None
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sample_ids: Tensor | None = None
    depths: Tensor | None = None
    has_checked_ids: bool = False

    @classmethod
    def from_dict(cls, batch: Mapping[str, Any], labels: Tensor | None = None) -> Self:
        """Return a caller's batch as a `TokenBatch`.

        Raises ValueError if `batch["input"]` is not [B, T] or has no token, for a known entry that is
        not a tensor, for ids, positions or lengths of documents that are not integers, and for positions or
        a padding mask of another shape.
        """
        tokens = batch.get("input")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or not tokens.numel():
            got = type(tokens).__name__
            if isinstance(tokens, Tensor):
                got = f"shape {tuple(tokens.shape)}"
            raise ValueError(
                "a microbatch needs 'input', a tensor of token ids [B, T] with at least one token, got "
                f"{got} for it and the keys {sorted(batch)}; give a single row as input[None], and leave "
                "a microbatch without tokens out of the list"
            )
        entries = {key: value for key, value in batch.items() if key != "input"}
        for key in (*_PADDING_OF, *BOUNDARY_KEYS):
            value = batch.get(key) if key != "labels" or labels is None else labels
            if not isinstance(value, Tensor | None):
                raise ValueError(
                    f"the batch's {key!r} must be a tensor, got {type(value).__name__}; convert it "
                    "with torch.as_tensor"
                )
        for key in ("positions", PARENT_IDS, *BOUNDARY_KEYS):
            if isinstance(entries.get(key), Tensor):
                entries[key] = whole_numbers(f"the batch's {key!r}", entries[key])
        sample_ids = getattr(tokens, SAMPLE_IDS, None)
        if tokens.dim() == 2:  # a client's own model may take features [B, T, n]
            tokens = whole_numbers("the batch's 'input'", tokens)
            for key in ("positions", "attention_masks"):
                if isinstance(entries.get(key), Tensor):
                    per_token({**entries, "input": tokens}, key)
        return cls(tokens, labels, None, entries, sample_ids)

    def as_dict(self) -> Entries:
        """Return the caller's entries and the tokens, without `self.labels`."""
        return {"input": self.tokens, **self.entries}

    @property
    def num_valid(self) -> int:
        """The number of labels that are not IGNORE_INDEX."""
        assert self.labels is not None
        return int((self.labels != IGNORE_INDEX).sum())

    def check_labels(self) -> None:
        """Raise ValueError if the labels are not [B, T]."""
        shape = None if self.labels is None else tuple(self.labels.shape)
        if shape is None or shape[:2] != self.tokens.shape[:2]:
            raise ValueError(
                "the default loss and head= need labels of the shape of 'input' [B, T], got "
                f"{shape} for {tuple(self.tokens.shape)}; pass labels= or the batch's 'labels', with "
                f"{IGNORE_INDEX} for tokens without a target, or a loss_fn that needs no labels"
            )

    def with_token_labels(self, vocab_size: int | None) -> Self:
        """Return the batch with its labels as int64 token ids; raises ValueError for other labels."""
        self.check_labels()
        assert self.labels is not None
        labels = whole_numbers("labels", self.labels)
        if not self.has_checked_ids:
            check_ids("labels", labels, vocab_size)
        return dataclasses.replace(self, labels=labels.to(torch.int64))

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors but `sample_ids` on the device."""
        return self._with_each(lambda key, x: x if key == SAMPLE_IDS else tensor_to(x, device))

    def with_tokens(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """Return a copy with `change(x, padding)` for every tensor that has a value per token.

        x: [B, T, ...], or [1, T, ...] if all rows share it. padding: x's value for padding tokens.
        """
        n_rows, seq_len = self.tokens.shape[:2]

        def apply(key: str, x: Any) -> Any:
            is_per_token = (
                isinstance(x, Tensor) and x.dim() >= 2 and key not in (*_LENGTHS, SAMPLE_IDS)
            )
            if is_per_token and x.shape[0] in (1, n_rows) and x.shape[1] == seq_len:
                return change(x, _PADDING_OF.get(key, 0))
            return x

        return self._with_each(apply)

    def split(self, n_rows: int) -> list[Self]:
        """Return microbatches of `n_rows` rows; the last one may have fewer.

        Tensors [B, ...] and lists of length B are split, everything else is shared. Raises ValueError for
        entries that cannot be split by rows.
        """
        num_rows = len(self.tokens)
        if n_rows >= num_rows:
            return [self]
        # Tensors and lists in the dataclass's own fields have one entry per row.
        own = {field.name for field in dataclasses.fields(self)}
        of_rows = own | {k for k, x in self.entries.items() if _has_rows(k, x, num_rows, n_rows)}

        def cut(first: int, key: str, x: Any) -> Any:
            is_cut = key in of_rows and isinstance(x, Tensor | list | tuple)
            return x[first : first + n_rows] if is_cut else x

        return [self._with_each(partial(cut, first)) for first in range(0, num_rows, n_rows)]

    def _with_each(self, change: Callable[[str, Any], Any]) -> Self:
        """Return a copy whose fields, and whose values in `entries`, are `change(name, value)`."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        entries = own.pop("entries")
        return type(self)(
            **{key: change(key, value) for key, value in own.items()},
            entries={key: change(key, value) for key, value in entries.items()},
        )


def whole_numbers(name: str, x: Tensor) -> Tensor:
    """Return x as int32 or int64. Raises ValueError for floating-point numbers and booleans."""
    if x.dtype in (torch.int32, torch.int64):
        return x
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise ValueError(
            f"{name} must be whole numbers, got a tensor of {x.dtype}; give them as torch.int64"
        )
    return x.to(torch.int64)


def check_ids(name: str, ids: Tensor, vocab_size: int | None) -> None:
    """Raise ValueError for ids outside the model's vocabulary; labels may hold IGNORE_INDEX.

    Without this check such a token would get an embedding of zeros under tensor parallelism, and under
    a pipeline only one rank would fail. Ids of which the host has no copy are not checked.
    """
    ids = on_host(ids)
    if vocab_size is None or ids.device.type != "cpu" or not ids.numel():
        return
    also = ""
    if name == "labels":
        ids, also = ids.masked_fill(ids == IGNORE_INDEX, 0), f" or {IGNORE_INDEX}"
    smallest, largest = (x.item() for x in ids.aminmax())
    if not 0 <= smallest <= largest < vocab_size:
        raise ValueError(
            f"{name} must be ids in [0, {vocab_size}){also}, got {smallest} to {largest}; use the "
            "tokenizer that the model was trained with"
        )


def tensor_to(x: Any, device: torch.device) -> Any:
    """Return a tensor on the device; any other value as it is."""
    return to_device(x, device) if isinstance(x, Tensor) else x


def _has_rows(key: str, value: Any, num_rows: int, n_rows: int) -> bool:
    """True if an entry is split by rows, False if all rows share it; ValueError if neither is possible."""
    if isinstance(value, Tensor):
        # 1-D cumulative lengths [n + 1] span the concatenated rows.
        if value.dim() >= (2 if key == "cu_seqlens" else 1) and len(value) == num_rows:
            return True
        # All rows may share a tensor of one row, unless it holds lengths.
        if value.dim() == 0 or (value.dim() >= 2 and len(value) == 1 and key not in _LENGTHS):
            return False
    elif key != "attention_masks":
        return isinstance(value, list | tuple) and len(value) == num_rows
    raise ValueError(
        f"a batch of {num_rows} rows is split into pipeline microbatches of {n_rows}, and its {key!r} "
        f"(shape {list(getattr(value, 'shape', ()))}) cannot be split by rows; give a list of microbatches"
    )
