"""The base model of adapters, which their checkpoints name but do not hold.

The digest covers every frozen parameter, bit for bit, and is the same on every layout of ranks.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from torchtitan.checkpoint.states import saved_shapes_in
from torchtitan.checkpoint.stream import fingerprint
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.tools.logging import logger

NAME, DIGEST = "base model", "base model's digest"  # entries of the run's record


def holds_adapters(path: str) -> bool:
    """True if a DCP checkpoint holds adapters, and so not their base."""
    return any(name.endswith(("lora_a", "lora_b")) for name in saved_shapes_in(path) or ())


def base_record(entries: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the name and the digest of the base. Collective; gathers one weight at a time.

    entries: the frozen parameters of this rank's model parts.
    """
    own = {key: f"{t.dtype} {tuple(t.shape)} {fingerprint(t).item()}" for key, t in entries.items()}
    lines = sorted({f"{key} {value}" for part in all_ranks(own) for key, value in part.items()})
    return {NAME: name, DIGEST: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]}


def check_same_base(path: str, saved: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raise ValueError if the adapters of the checkpoint `path` were trained on another base.

    saved, own: the records of the checkpoint and of this run.
    """
    if DIGEST not in saved:
        logger.warning(f"{path} does not name the base model of its adapters: it is not compared")
    elif saved[DIGEST] != own[DIGEST]:
        raise ValueError(
            f"The adapters in {path} were trained on another base model, {saved.get(NAME)} (digest "
            f"{saved[DIGEST]}), got {own[NAME]} (digest {own[DIGEST]}); set "
            "checkpoint.initial_load_path to that base, with the dtypes of that run"
        )
