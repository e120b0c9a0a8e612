"""The mask types of `model.attn_mask_type`, and how each one finds document boundaries.

If a batch has "document_ids", "seq_lens" or "cu_seqlens", these entries set the boundaries instead.
"""

from typing import Any, NamedTuple

POSITIONS = "positions"


class MaskType(NamedTuple):
    """What marks a document boundary under a mask type.

    source: a key of the batch, or the plural name of `token`; "": each row is one document.
    token: the tokenizer's attribute with the id of the token that marks a boundary; None: not a token.
    begins: True: a document begins with its token. False: it ends with its token.
    """

    source: str = ""
    token: str | None = None
    begins: bool = False


END_OF_TEXT = MaskType("end-of-text tokens", token="eos_id")

MASK_TYPES: dict[str, MaskType] = {
    "causal": MaskType(),
    "block_causal": END_OF_TEXT,
    "position_block_causal": MaskType(POSITIONS),
}


def mask_type(attn_mask_type: str) -> MaskType:
    """Return a mask type by its name. Raises ValueError for an unknown name."""
    if attn_mask_type not in MASK_TYPES:
        raise ValueError(
            f"model.attn_mask_type must be one of {', '.join(MASK_TYPES)}, got "
            f"{attn_mask_type!r}; set it to one of them"
        )
    return MASK_TYPES[attn_mask_type]


def boundary_token(tokenizer: Any, attn_mask_type: str) -> int | None:
    """Return the id of the mask type's boundary token, or of end-of-text if the mask type has none.

    None if there is no tokenizer, or if the tokenizer lacks the token.
    """
    return getattr(tokenizer, mask_type(attn_mask_type).token or "eos_id", None)


def separates_documents(attn_mask_type: str) -> bool:
    """True if attention stays within documents. Raises ValueError for an unknown mask type."""
    return mask_type(attn_mask_type).source != ""


def reads_positions(attn_mask_type: str | None) -> bool:
    """True if a document begins where positions do not increase by one; False for None."""
    return attn_mask_type is not None and mask_type(attn_mask_type).source == POSITIONS


def check_kernel(attn_type: str, attn_mask_type: str) -> None:
    """Raise ValueError if the mask type is unknown, or if the kernel does not support it."""
    if separates_documents(attn_mask_type) and attn_type == "sdpa":
        raise ValueError(
            "model.attn_type = 'sdpa' cannot keep documents apart, got model.attn_mask_type = "
            f"{attn_mask_type!r} (the flavor's, if the job sets none); set model.attn_type to 'flex' "
            "or 'varlen', or model.attn_mask_type to 'causal'"
        )
