"""What a job does with the documents that are packed into the rows of its batches.

Trainer, validator and engine share this: where a document ends the loss asks for no next token,
RoPE positions begin anew, and attention costs the square of each document's length.

B rows, T tokens per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    PADDING,
    boundaries_on_host,
    last_tokens,
    positions_from_document_ids,
    read_document_ids,
)
from torchtitan.config.job_config import Training
from torchtitan.tools.host_copy import to_device
from torchtitan.tools.logging import logger, warn_once

Batch = dict[str, Any]


@dataclass(frozen=True)
class PackingPolicy:
    """The choices of one job; see `PackingPolicy.of` for where they come from.

    attn_type: "sdpa" takes no mask. attn_mask_type: "causal" keeps no documents apart.
    eos_id: the end-of-text token, None if unknown.
    """

    attn_type: str
    attn_mask_type: str
    eos_id: int | None
    restart_positions: bool
    mask_boundary_loss: bool

    @classmethod
    def of(cls, training: Training, model_args: Any, tokenizer: Any) -> "PackingPolicy":
        """Read the choices off a job; unset ones follow the model's attn_mask_type."""
        attn_mask_type = getattr(model_args, "attn_mask_type", "causal")
        mask_loss = training.mask_boundary_loss
        return cls(
            getattr(model_args, "attn_type", "sdpa"),
            attn_mask_type,
            getattr(tokenizer, "eos_id", None),
            training.restart_positions,
            attn_mask_type != "causal" if mask_loss is None else mask_loss,
        )

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.attn_mask_type != "causal"

    def document_ids(self, batch: Mapping[str, Any]) -> Tensor:
        """Document ids [B, T] of a batch; under a causal mask, those of "block_causal".

        Raises ValueError if the batch does not say where its documents begin.
        """
        mask_type = self.attn_mask_type if self.separates_documents else "block_causal"
        return read_document_ids(batch, mask_type, self.eos_id)

    # ---- what the loss and the FLOP count see ----

    def mask_labels(self, batch: Batch, labels: Tensor) -> Tensor:
        """Return labels [B, T], ignored where the next token is of another document.

        Padding is ignored, too. A row's last label is ignored only if the row's last token is
        padding or closes its document with the end-of-text id: nothing else tells. Batches
        with an attention mask of their own have labels of their own: returned as they are.
        """
        if not self.mask_boundary_loss or "attention_masks" in batch:
            return labels
        ends = last_tokens(self.document_ids(batch))
        if self.eos_id is not None and self._reads_eos(batch):
            ends[:, -1] |= batch["input"][:, -1] == self.eos_id
        return labels.masked_fill(ends, IGNORE_INDEX)

    def _reads_eos(self, batch: Batch) -> bool:
        has_explicit = any(batch.get(key) is not None for key in BOUNDARY_KEYS)
        return self.attn_mask_type != "position_block_causal" and not has_explicit

    def attended_pairs(self, batch: Batch) -> int:
        """Sum of squared document lengths: the pairs of tokens that attention works on.

        As FLOP counts have it, both halves of each square count, and for a causal mask the
        square of whole rows.
        """
        tokens = batch["input"]
        if not self.separates_documents or "attention_masks" in batch:
            return tokens.shape[0] * tokens.shape[1] ** 2
        document_ids = self.document_ids(batch)
        # The n-th token of a document adds n^2 - (n - 1)^2 = 2n - 1 to its square.
        added = 2 * positions_from_document_ids(document_ids) + 1
        return int(added.masked_fill(document_ids == PADDING, 0).sum())

    # ---- what the model sees ----

    def model_inputs(self, model: Any, batch: Batch, tokenizer: Any) -> tuple[Tensor, Batch, Batch]:
        """Return (inputs [B, T], extra_inputs, extra_kwargs) for the model's forward.

        extra_inputs: the batch's other entries, without those that only say where documents
            begin; with positions that restart in each document if the model keeps documents
            apart and the batch brings none.
        extra_kwargs: the attention masks of a model that wants some, unless the batch has them;
            a padding mask [B, T] among its entries becomes the kernel's.
        """
        inputs = batch["input"]
        extra_inputs = {key: value for key, value in batch.items() if key != "input"}
        extra_kwargs: Batch = {}
        if isinstance(extra_inputs.get("attention_masks"), Tensor):
            padding_mask = extra_inputs.pop("attention_masks")
            extra_kwargs["attention_masks"] = model.get_padding_masks(padding_mask)
        elif self.attn_type != "sdpa" and "attention_masks" not in batch:
            for_masks = dict(extra_inputs)
            if self.separates_documents:
                # The mask gets these as the one source: it reads none anew, nor warns once more.
                document_ids = self.document_ids(boundaries_on_host(batch))
                for key in (*BOUNDARY_KEYS, "positions"):
                    for_masks.pop(key, None)
                for_masks["document_ids"] = to_device(document_ids, inputs.device)
                if self.restart_positions and "positions" not in batch:
                    positions = positions_from_document_ids(document_ids)
                    extra_inputs["positions"] = to_device(positions, inputs.device)
            extra_kwargs["attention_masks"] = model.get_attention_masks(
                input_batch=inputs, tokenizer=tokenizer, extra_inputs=for_masks
            )
        for key in BOUNDARY_KEYS:
            if extra_inputs.pop(key, None) is not None and not self.separates_documents:
                _warn_of_unused(key)
        return inputs, extra_inputs, extra_kwargs


def _warn_of_unused(key: str) -> None:
    warn_once(
        logger,
        f"the batch's {key!r} keep no documents apart under model.attn_mask_type = 'causal'; set "
        "it to 'block_causal' or 'position_block_causal', with model.attn_type 'flex' or 'varlen'",
    )


def split_rows(batch: Batch, labels: Tensor, n_rows: int) -> tuple[list[Batch], list[Tensor]]:
    """Return microbatches of `n_rows` rows (the last may have fewer) and their labels.

    batch: entries of B rows are split, tensors [B, ...] and lists of B; tensors of one row or no
        dim and everything else are shared.
    Raises ValueError for entries that cannot be split by rows.
    """
    num_rows = len(batch["input"])
    if n_rows >= num_rows:
        return [batch], [labels]
    for key, value in batch.items():
        is_kernels_mask = key == "attention_masks" and not isinstance(value, Tensor)
        if is_kernels_mask or (isinstance(value, Tensor) and not _has_rows(key, value, num_rows)):
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"a batch of {num_rows} rows is split into pipeline microbatches of {n_rows}, and "
                f"its {key!r}{shape} cannot be split by rows; give a list of microbatches instead"
            )
    firsts = range(0, num_rows, n_rows)
    batches = [
        {
            key: value[first : first + n_rows] if _is_of_rows(value, num_rows) else value
            for key, value in batch.items()
        }
        for first in firsts
    ]
    return batches, [labels[first : first + n_rows] for first in firsts]


def _has_rows(key: str, value: Tensor, num_rows: int) -> bool:
    """Whether it has B rows, one for all (no row of lengths is), or is one number for all."""
    if value.dim() < 2:
        return value.dim() == 0
    return len(value) == num_rows or (len(value) == 1 and key not in ("seq_lens", "cu_seqlens"))


def _is_of_rows(value: Any, num_rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == num_rows
    return isinstance(value, list | tuple) and len(value) == num_rows
