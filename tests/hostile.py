"""Files that try to execute something when they are read.

Each creates a folder, the canary, if its code is executed, as by torch or pickle without
precautions. Tests assert that reading them here does not create it.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


class Creates:
    """Creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.canary,)


class _CreatesByEval(Creates):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').mkdir({self.canary!r})",)


class _CreatesByTensor(Creates):
    """Hides in a tensor's storage, bytes that torch unpickles separately."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (entry_that_creates(Path(self.canary)),)


def pickle_that_creates(canary: Path) -> bytes:
    return pickle.dumps({"state": Creates(canary)})


def _pickle_by_names(canary: Path) -> bytes:
    """Return an old protocol's pickle, which reaches the function as an attribute of a harmless module."""
    return f"cshutil\nos.mkdir\n(V{canary}\ntR.".encode()


PICKLES = {
    "by a call": pickle_that_creates,
    "by eval": lambda canary: pickle.dumps(_CreatesByEval(canary)),
    "by a tensor": lambda canary: pickle.dumps(_CreatesByTensor(canary)),
    "by a dotted name": lambda canary: b"\x80\x04" + _pickle_by_names(canary),
}


def entry_that_creates(canary: Path) -> bytes:
    """Return the bytes that torch.save writes for a malicious entry of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(Creates(canary), buffer)
    return buffer.getvalue()


# Checkpoints: each function changes a step folder and removes its hashes, as if it were downloaded.


def plant_in_metadata(step: Path, canary: Path) -> None:
    """Add an object that executes code to `.metadata`."""
    metadata = dcp.FileSystemReader(step).read_metadata()
    metadata.planner_data = Creates(canary)
    write_metadata(step, metadata)


def plant_in_entry(step: Path, canary: Path, name: str) -> None:
    """Replace the entry `name`, such as a number, by an object that executes code."""
    replace_entry(step, name, entry_that_creates(canary))


def plant_in_position(step: Path, canary: Path) -> None:
    buffer = io.BytesIO()
    torch.save(pickle_that_creates(canary), buffer)
    replace_entry(step, "dataloader.dp_rank_0", buffer.getvalue())


def replace_entry(step: Path, name: str, content: bytes) -> None:
    metadata = dcp.FileSystemReader(step).read_metadata()
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    info = metadata.storage_data[index]
    with open(step / info.relative_path, "ab") as file:
        info.offset, info.length = file.tell(), len(content)
        file.write(content)
    write_metadata(step, metadata)


def redirect_files(step: Path, name: str) -> None:
    """Make `.metadata` say that all tensors are in the file `name`."""
    metadata = dcp.FileSystemReader(step).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    write_metadata(step, metadata)


def change_chunks(step: Path, name: str, *boxes: tuple[list[int], list[int]]) -> None:
    """Make `.metadata` say that the tensor was saved in chunks of these (offsets, sizes)."""
    metadata = dcp.FileSystemReader(step).read_metadata()
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        info = metadata.storage_data.pop(index)
    for offsets, _ in boxes:
        metadata.storage_data[MetadataIndex(name, offsets)] = info
    metadata.state_dict_metadata[name].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
    ]
    write_metadata(step, metadata)


def write_metadata(step: Path, metadata: Any) -> None:
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    forget_hashes(step)


def forget_hashes(step: Path) -> None:
    (step / ".xxh128sums").unlink(missing_ok=True)


def remake_hashes(step: Path) -> None:
    """Hash the files as releases before November 2026 did."""
    forget_hashes(step)
    files = sorted(step.iterdir())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (step / ".sha256sums").write_text("\n".join([f"# {len(lines)} files", *lines]) + "\n")


def keep_only(step: Path) -> None:
    """Remove all other steps, so that there is none to fall back to."""
    for other in step.parent.glob("step-*"):
        if other != step:
            shutil.rmtree(other)


def safetensors_file(path: Path, header: Any, data: bytes = b"") -> None:
    """header: its JSON, as an object or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def deflated(content: bytes) -> bytes:
    """Return an archive of torch.save compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as plain:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in plain.namelist():
                archive.writestr(name, plain.read(name))
    return buffer.getvalue()
