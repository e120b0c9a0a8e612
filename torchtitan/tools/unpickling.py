"""Reading pickles without executing them.

A pickle may name any function and have it called. Here only what a checkpoint consists of can be
named: plain containers and numbers, tensors, and what torch's distributed checkpoint (DCP) writes
about them.
"""

import io
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import IO, Any

import torch

_Names = dict[tuple[str, str], Any]


def read_plain(data: Any, what: str) -> Any:
    """The numbers, strings, bytes, tensors and containers of these that `data` was pickled from.

    what: begins the message of the ValueError that is raised if there is anything else in it.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"{what} must be bytes, got a {type(data).__name__}")
    return _read(io.BytesIO(data), _PLAIN, what)


def read_dcp_metadata(file: IO[bytes], what: str) -> Any:
    """The `.metadata` of a DCP checkpoint. Raises ValueError, which begins with `what`."""
    return _read(file, _dcp_names(), what)


def refusal(name: str) -> str:
    """Why a file that names this function or class is not read."""
    return f"it names {name}, which is no plain data and might execute code; nothing was executed"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: _Names) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(refusal(f"{module}.{name}")) from None


def _read(file: IO[bytes], names: _Names, what: str) -> Any:
    # A pickle can also set attributes of the classes that it names.
    classes = [cls for cls in names.values() if isinstance(cls, type)]
    before = [dict(vars(cls)) for cls in classes]
    try:
        return _Unpickler(file, names).load()
    except Exception as error:  # of a damaged pickle anything may come
        raise ValueError(f"{what} cannot be read: {error or type(error).__name__}") from error
    finally:
        for cls, attributes in zip(classes, before, strict=True):
            now = dict(vars(cls))
            for name in now.keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(cls, name, value)


def _storage_from_bytes(data: bytes) -> Any:
    """As torch.storage._load_from_bytes, which a pickled tensor names, but without executing."""
    return torch.load(io.BytesIO(data), weights_only=True)


_PLAIN: _Names = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("collections", "deque"): deque,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage_from_bytes,
} | {("builtins", cls.__name__): cls for cls in (complex, dict, float, frozenset, int, list, set)}


def _dcp_names() -> _Names:
    from torch.distributed.checkpoint import filesystem, metadata

    encoding = metadata._MEM_FORMAT_ENCODING
    classes = [
        encoding,
        filesystem._StorageInfo,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
    ]
    names: _Names = {(cls.__module__, cls.__name__): cls for cls in classes}
    # The folder it was written to, which is not read.
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            names[module, name] = lambda *parts: "/".join(map(str, parts))
    return names | {
        ("builtins", "getattr"): lambda _, name: encoding[name],  # enums of Python 3.11.0 to 3.11.3
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    }
