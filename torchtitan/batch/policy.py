"""A job's settings for documents packed into the rows of its batches. B rows, T tokens per row."""

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan.batch.batch import Batch, TokenBatch, check_ids
from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    PADDING,
    PARENT_IDS,
    boundaries_on_host,
    branch_depths,
    last_tokens,
    per_token,
    positions_from_document_ids,
    read_document_ids,
)
from torchtitan.config.job_config import Training
from torchtitan.config.mask_types import (
    boundary_token,
    mask_type,
    reads_positions,
    separates_documents,
)
from torchtitan.tools.host_copy import fetch, to_device
from torchtitan.tools.logging import already_said, saying_once_per


@dataclasses.dataclass(frozen=True)
class DocumentPolicy:
    """Reads document boundaries, masks labels at boundaries, and counts (query, key) pairs for FLOPs.

    attn_type: "sdpa" gets no mask from document boundaries. attn_mask_type: "causal" attention does not
        separate documents.
    boundary_token: see `config.mask_types.boundary_token`. vocab_size: None for a model without a vocabulary.
    tokenizer: passed to `get_attention_masks`, which a client's own model may compute from the tokenizer.
    said: the warnings that were logged already.
    """

    attn_type: str
    attn_mask_type: str
    boundary_token: int | None
    restart_positions: bool
    mask_boundary_loss: bool
    vocab_size: int | None = None
    tokenizer: Any = dataclasses.field(default=None, repr=False, compare=False)
    said: set[Any] = dataclasses.field(default_factory=already_said, repr=False, compare=False)

    @classmethod
    def from_job(
        cls, training: Training, model_args: Any, tokenizer: Any, said: set[Any] | None = None
    ) -> "DocumentPolicy":
        """Return a job's policy. If mask_boundary_loss is None, the model's attn_mask_type decides."""
        attn_mask_type = getattr(model_args, "attn_mask_type", "causal")
        mask_loss = training.mask_boundary_loss
        return cls(
            getattr(model_args, "attn_type", "sdpa"),
            attn_mask_type,
            boundary_token(tokenizer, attn_mask_type),
            training.restart_positions,
            separates_documents(attn_mask_type) if mask_loss is None else mask_loss,
            getattr(model_args, "vocab_size", None),
            tokenizer,
            already_said() if said is None else said,
        )

    @property
    def separates_documents(self) -> bool:
        return separates_documents(self.attn_mask_type)

    def token_batch(self, batch: Batch | TokenBatch, labels: Tensor | None = None) -> TokenBatch:
        """Return a dict as a `TokenBatch`, with document ids if attention separates documents.

        A batch with attention masks of its own gets no ids. `labels` replace those of a `TokenBatch`.
        With `parent_ids`, documents are branches of trees, and the batch gets `depths` and positions.
        Raises ValueError where `TokenBatch.from_dict` and `branch_depths` do, for ids outside the model's
        vocabulary, for a batch that lacks the source of its document boundaries, and for trees whose
        positions do not continue along the branches.
        """
        if not isinstance(batch, TokenBatch):
            batch = TokenBatch.from_dict(batch, labels)
            if batch.tokens.dim() == 2:
                check_ids("the batch's 'input'", batch.tokens, self.vocab_size)
        elif labels is not None:
            batch = dataclasses.replace(batch, labels=labels)
        has_own_masks = "attention_masks" in batch.entries
        separates, has_parents = self.separates_documents, batch.entries.get(PARENT_IDS) is not None
        if has_parents and (has_own_masks or not separates or "document_ids" not in batch.entries):
            raise ValueError(
                f"a batch with {PARENT_IDS!r} must have 'document_ids' and no 'attention_masks', and "
                f"model.attn_mask_type must be 'block_causal' or 'position_block_causal', got "
                f"{sorted(batch.entries)} and {self.attn_mask_type!r}; set the mask type, with "
                "model.attn_type 'flex' or 'varlen'"
            )
        if batch.document_ids is None and separates and not has_own_masks:
            batch = dataclasses.replace(batch, document_ids=self.document_ids(batch))
        if not has_parents or batch.depths is not None:
            return batch
        return _with_depths(batch)

    def document_ids(self, batch: Batch | TokenBatch) -> Tensor:
        """Return the document ids of a batch, [B, T] int32 on its device, padding -1.

        Under "causal" only the loss may need the ids, and they are read as under "block_causal".
        """
        if not isinstance(batch, TokenBatch):
            batch = self.token_batch(batch)
        if batch.document_ids is not None:
            return batch.document_ids
        # Remember warnings in `said`, also on the data-reading thread.
        with saying_once_per(self.said):
            boundaries = dict(boundaries_on_host(batch.as_dict()))
            if boundaries.get(PARENT_IDS) is not None:
                boundaries.pop("positions", None)  # `_with_depths` checks the positions of trees
            ids = read_document_ids(boundaries, self.attn_mask_type, self.boundary_token)
        return to_device(ids, batch.tokens.device)

    # ---- for the loss and the FLOP count ----

    def mask_labels(self, batch: Batch | TokenBatch, labels: Tensor) -> Tensor:
        """Return the labels [B, T], IGNORE_INDEX where the next token belongs to another document.

        Labels of padding are ignored, too. The token after a row is unknown, so a row's last label is
        ignored only if the last token is padding, or the boundary token shows that a document ends there.
        Labels are unchanged without `mask_boundary_loss`, and if the batch has its own attention masks.
        """
        batch = self.token_batch(batch, labels)
        batch.check_labels()
        if not self.mask_boundary_loss or "attention_masks" in batch.entries:
            return labels
        ends = last_tokens(self.document_ids(batch))
        if batch.depths is not None:
            # Keep a label if the next token continues the branch, although its document differs.
            is_next = batch.depths[:, 1:] == batch.depths[:, :-1] + 1
            ends[:, :-1] &= ~is_next | (batch.depths[:, :-1] < 0)
        has_explicit = any(batch.entries.get(key) is not None for key in BOUNDARY_KEYS)
        # Explicit boundaries overrule the boundary token, except in the data loader's rows (with sample_ids).
        reads_token = batch.sample_ids is not None or not has_explicit
        token = self.boundary_token
        if reads_token and token is not None and not reads_positions(self.attn_mask_type):
            marks = labels if mask_type(self.attn_mask_type).begins else batch.tokens
            ends[:, -1] |= marks[:, -1] == token
        return labels.masked_fill(ends, IGNORE_INDEX)

    def training_batch(self, batch: Batch | TokenBatch, labels: Tensor) -> TokenBatch:
        """Return what `token_batch` returns, with the labels of `mask_labels`."""
        batch = self.token_batch(batch, labels)
        return dataclasses.replace(batch, labels=self.mask_labels(batch, labels))

    def attended_pairs(self, batch: TokenBatch) -> int:
        """Return the sum of squared document lengths (under "causal": row lengths), for FLOP counts.

        It counts all pairs of tokens in a document, also those hidden by causality or a layer's window.
        """
        if batch.document_ids is None or not self.separates_documents:
            return batch.tokens.shape[0] * batch.tokens.shape[1] ** 2
        # The n-th token of a document adds n^2 - (n - 1)^2 = 2n - 1 to its square.
        positions = batch.depths
        if positions is None:
            positions = positions_from_document_ids(batch.document_ids)
        added = 2 * positions.long() + 1
        return int(added.masked_fill(batch.document_ids == PADDING, 0).sum())


def _with_depths(batch: TokenBatch) -> TokenBatch:
    """Set `depths`, each token's position on its branch, and `positions` to the same numbers.

    Unchanged if no document has a parent. Raises ValueError if the batch has other positions.
    """
    assert batch.document_ids is not None
    depths = branch_depths(batch.document_ids, per_token(batch.as_dict(), PARENT_IDS))
    if depths is None:
        return batch
    positions = batch.entries.get("positions")
    if positions is not None:
        differs = (fetch(positions) != depths) & (depths != PADDING)
        if differs.any():
            row, column = differs.nonzero()[0].tolist()
            raise ValueError(
                "the positions of a tree count from 0 at its root and go on along each branch, got "
                f"{int(fetch(positions).expand(depths.shape)[row, column])} instead of "
                f"{int(depths[row, column])} at token {column} of row {row}; leave 'positions' out"
            )
    depths, positions = (to_device(x, batch.tokens.device) for x in (depths, depths.long()))
    entries = {**batch.entries, "positions": positions}
    return dataclasses.replace(batch, depths=depths, entries=entries)
