"""What a job does with the documents that are packed into the rows of its batches.

Trainer, validator and engine share this: where a document ends the loss asks for no next token,
RoPE positions restart, and attention costs the square of each document's length.

B rows, T tokens per row.
"""

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan.batch.batch import Batch, Entries, TokenBatch, check_ids
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    PADDING,
    boundaries_on_host,
    last_tokens,
    positions_from_document_ids,
    read_document_ids,
    warn_of_restarts,
)
from torchtitan.config.job_config import Training
from torchtitan.tools.host_copy import on_host, to_device
from torchtitan.tools.logging import logger, warn_once

ModelInputs = tuple[Tensor, Tensor | None, Entries, Entries]
"""inputs [B, T], labels [B, T], and what else the model's forward gets: other entries of the batch;
keywords, such as masks. Under context parallelism all hold this rank's tokens, [B, T/cp]."""


@dataclasses.dataclass(frozen=True)
class DocumentPolicy:
    """The choices of one job; see `DocumentPolicy.of` for where they come from.

    attn_type: "sdpa" takes no mask. attn_mask_type: "causal" keeps no documents apart.
    eos_id: the end-of-text token, None if unknown. vocab_size: None for a model without one.
    """

    attn_type: str
    attn_mask_type: str
    eos_id: int | None
    restart_positions: bool
    mask_boundary_loss: bool
    vocab_size: int | None = None

    @classmethod
    def of(cls, training: Training, model_args: Any, tokenizer: Any) -> "DocumentPolicy":
        """Read the choices off a job; unset ones follow the model's attn_mask_type."""
        attn_mask_type = getattr(model_args, "attn_mask_type", "causal")
        mask_loss = training.mask_boundary_loss
        return cls(
            getattr(model_args, "attn_type", "sdpa"),
            attn_mask_type,
            getattr(tokenizer, "eos_id", None),
            training.restart_positions,
            attn_mask_type != "causal" if mask_loss is None else mask_loss,
            getattr(model_args, "vocab_size", None),
        )

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.attn_mask_type != "causal"

    def pack(self, batch: Batch | TokenBatch, labels: Tensor | None = None) -> TokenBatch:
        """The batch as a value, with the ids of the documents that attention keeps apart.

        A batch that brings its own attention masks gets no ids. A value keeps what it has but for
        labels that are given.
        Raises ValueError for `input` that is not [B, T] or has other ids than the model, or if the
        batch does not say where its documents begin.
        """
        if isinstance(batch, TokenBatch):
            return batch if labels is None else dataclasses.replace(batch, labels=labels)
        packed = TokenBatch.of(batch, labels)
        if packed.tokens.dim() == 2:
            check_ids("the batch's 'input'", packed.tokens, self.vocab_size)
        if not self.separates_documents or "attention_masks" in batch:
            return packed
        return dataclasses.replace(packed, document_ids=self.document_ids(packed))

    def document_ids(self, batch: Batch | TokenBatch) -> Tensor:
        """The documents of a batch, [B, T] int32 on its device, padding -1.

        Under a causal mask, which keeps none apart, they are read as under "block_causal".
        Raises ValueError as `pack` does.
        """
        packed = batch if isinstance(batch, TokenBatch) else self.pack(batch)
        if packed.document_ids is not None:
            return packed.document_ids
        mask_type = self.attn_mask_type if self.separates_documents else "block_causal"
        ids = read_document_ids(boundaries_on_host(packed.as_dict()), mask_type, self.eos_id)
        return to_device(ids, packed.tokens.device)

    # ---- what the loss and the FLOP count see ----

    def mask_labels(self, batch: Batch | TokenBatch, labels: Tensor) -> Tensor:
        """The labels [B, T] of a batch, IGNORE_INDEX where the next token is of another document.

        Padding is ignored, too. A row's last label is ignored only if the row's last token is
        padding or closes its document with the end-of-text id, because the next row is unknown.
        Labels are returned as they are if `training.mask_boundary_loss` is off, and for a batch
        with an attention mask of its own. Raises ValueError for labels of another shape.
        """
        batch = self.pack(batch, labels)
        batch.check_labels()
        if not self.mask_boundary_loss or "attention_masks" in batch.entries:
            return labels
        ends = last_tokens(self.document_ids(batch))
        has_explicit = any(batch.entries.get(key) is not None for key in BOUNDARY_KEYS)
        reads_eos = self.attn_mask_type != "position_block_causal" and not has_explicit
        if reads_eos and self.eos_id is not None:
            ends[:, -1] |= batch.tokens[:, -1] == self.eos_id
        return labels.masked_fill(ends, IGNORE_INDEX)

    def pack_masked(self, batch: Batch | TokenBatch, labels: Tensor) -> TokenBatch:
        """The batch as a value, with the labels of `mask_labels`: what the loss counts."""
        batch = self.pack(batch, labels)
        return dataclasses.replace(batch, labels=self.mask_labels(batch, labels))

    def attended_pairs(self, batch: TokenBatch) -> int:
        """Sum of squared document lengths: the pairs of tokens that attention works on.

        As FLOP counts have it, both halves of each square count, and for a causal mask the
        square of whole rows.
        """
        if batch.document_ids is None:
            return batch.tokens.shape[0] * batch.tokens.shape[1] ** 2
        # The n-th token of a document adds n^2 - (n - 1)^2 = 2n - 1 to its square.
        added = 2 * positions_from_document_ids(batch.document_ids) + 1
        return int(added.masked_fill(batch.document_ids == PADDING, 0).sum())

    # ---- what the model sees ----

    def model_inputs(
        self,
        model: Any,
        batch: TokenBatch,
        tokenizer: Any,
        sharding: ContextSharding | None = None,
    ) -> ModelInputs:
        """Return what the model's forward gets of a batch.

        Entries that only say where documents begin are left out; positions that restart in each
        document are added if the model keeps documents apart and the batch brings none. The
        keywords are the attention masks of a model that wants some, unless the batch has them; a
        padding mask [B, T] among its entries becomes the kernel's.
        """
        entries, device = dict(batch.entries), batch.tokens.device
        keywords: Entries = {}
        if isinstance(entries.get("attention_masks"), Tensor):
            padding_mask = entries.pop("attention_masks")
            keywords["attention_masks"] = model.get_padding_masks(padding_mask)
        elif self.attn_type != "sdpa" and "attention_masks" not in entries:
            for_masks = dict(entries)
            if batch.document_ids is not None:
                # The only source that the mask gets: it reads no other, nor warns of one again.
                for key in (*BOUNDARY_KEYS, "positions"):
                    for_masks.pop(key, None)
                for_masks["document_ids"] = batch.document_ids
                if self.restart_positions and "positions" not in entries:
                    restarted = positions_from_document_ids(on_host(batch.document_ids))
                    entries["positions"] = to_device(restarted, device)
            keywords["attention_masks"] = model.get_attention_masks(
                input_batch=batch.tokens, tokenizer=tokenizer, extra_inputs=for_masks
            )
        for key in BOUNDARY_KEYS:
            if entries.pop(key, None) is not None and not self.separates_documents:
                warn_once(
                    logger,
                    f"the batch's {key!r} keep no documents apart under model.attn_mask_type = "
                    "'causal'; set it to 'block_causal' or 'position_block_causal', with "
                    "model.attn_type 'flex' or 'varlen'",
                )
        positions = entries.get("positions")
        if not self.separates_documents and "attention_masks" not in batch.entries:
            if isinstance(positions, Tensor) and positions.dim() == 2:
                warn_of_restarts(positions)
        inputs = batch.tokens, batch.labels, entries, keywords
        return inputs if sharding is None else sharding.shard(*inputs)
