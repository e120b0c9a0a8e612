"""The mask types of `model.attn_mask_type`, and how each one finds document boundaries.

A batch's entries "document_ids", "seq_lens" or "cu_seqlens" take precedence over END_OF_TEXT and POSITIONS.
"""

END_OF_TEXT = "end-of-text tokens"
POSITIONS = "positions"

# Mask type -> what marks a document boundary. None: each row is one document.
BOUNDARY_SOURCES: dict[str, str | None] = {
    "causal": None,
    "block_causal": END_OF_TEXT,
    "position_block_causal": POSITIONS,
}


def boundary_source(attn_mask_type: str) -> str | None:
    """Return END_OF_TEXT, POSITIONS or None. Raises ValueError for an unknown mask type."""
    if attn_mask_type not in BOUNDARY_SOURCES:
        raise ValueError(
            f"model.attn_mask_type must be one of {', '.join(BOUNDARY_SOURCES)}, got "
            f"{attn_mask_type!r}; set it to one of them"
        )
    return BOUNDARY_SOURCES[attn_mask_type]


def separates_documents(attn_mask_type: str) -> bool:
    """True if attention stays within documents. Raises ValueError for an unknown mask type."""
    return boundary_source(attn_mask_type) is not None


def reads_positions(attn_mask_type: str | None) -> bool:
    """True if a document begins where positions do not increase by one; False for None."""
    return attn_mask_type is not None and boundary_source(attn_mask_type) == POSITIONS


def check_kernel(attn_type: str, attn_mask_type: str) -> None:
    """Raise ValueError if the mask type is unknown, or if the kernel does not support it."""
    if separates_documents(attn_mask_type) and attn_type == "sdpa":
        raise ValueError(
            "model.attn_type = 'sdpa' cannot keep documents apart, got model.attn_mask_type = "
            f"{attn_mask_type!r} (the flavor's, if the job sets none); set model.attn_type to 'flex' "
            "or 'varlen', or model.attn_mask_type to 'causal'"
        )
