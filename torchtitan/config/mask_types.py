"""The mask types of `model.attn_mask_type`, and where each one reads the boundaries of documents.

Explicit boundaries in a batch ("document_ids", "seq_lens", "cu_seqlens") take precedence over both
sources.
"""

END_OF_TEXT = "end-of-text tokens"
POSITIONS = "positions"

# Mask type -> source of boundaries. None: each row is one document.
BOUNDARY_SOURCES: dict[str, str | None] = {
    "causal": None,
    "block_causal": END_OF_TEXT,
    "position_block_causal": POSITIONS,
}


def boundary_source(attn_mask_type: str) -> str | None:
    """Return the entry of BOUNDARY_SOURCES. Raises ValueError for an unknown mask type."""
    if attn_mask_type not in BOUNDARY_SOURCES:
        raise ValueError(
            f"model.attn_mask_type must be one of {', '.join(BOUNDARY_SOURCES)}, got "
            f"{attn_mask_type!r}; set it to one of them"
        )
    return BOUNDARY_SOURCES[attn_mask_type]


def separates_documents(attn_mask_type: str) -> bool:
    """Return True if attention stays within documents. Raises as `boundary_source` does."""
    return boundary_source(attn_mask_type) is not None


def reads_positions(attn_mask_type: str | None) -> bool:
    """Return True if documents begin where positions do not go up by one; False for None."""
    return attn_mask_type is not None and boundary_source(attn_mask_type) == POSITIONS


def check_kernel(attn_type: str, attn_mask_type: str) -> None:
    """Raise ValueError for a mask type that is unknown, or that the kernel cannot apply."""
    if separates_documents(attn_mask_type) and attn_type == "sdpa":
        raise ValueError(
            "model.attn_type = 'sdpa' cannot keep documents apart, got model.attn_mask_type = "
            f"{attn_mask_type!r} (the flavor's, if the job sets none); set model.attn_type to 'flex' "
            "or 'varlen', or model.attn_mask_type to 'causal'"
        )
