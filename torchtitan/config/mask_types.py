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


def check_mask_type(attn_mask_type: str) -> None:
    """Raises ValueError for an unknown mask type."""
    if attn_mask_type not in BOUNDARY_SOURCES:
        raise ValueError(
            f"model.attn_mask_type must be one of {', '.join(BOUNDARY_SOURCES)}, got "
            f"{attn_mask_type!r}; set it to one of them"
        )


def reads_positions(attn_mask_type: str | None) -> bool:
    """Return True if documents begin where positions do not go up by one.

    False for None, with which a config leaves the choice to the flavor.
    Raises ValueError for an unknown mask type.
    """
    if attn_mask_type is None:
        return False
    check_mask_type(attn_mask_type)
    return BOUNDARY_SOURCES[attn_mask_type] == POSITIONS
