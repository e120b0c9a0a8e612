"""The reference's path of `torchtitan.listeners.profiling`."""
# ruff: noqa: F401

from torchtitan.listeners.profiling import (
    MEMORY_SNAPSHOT_MAX_ENTRIES,
    MemorySnapshot,
    maybe_enable_memory_snapshot,
    maybe_enable_profiling,
)
