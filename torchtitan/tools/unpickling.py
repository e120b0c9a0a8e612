"""Reads pickles without executing code from them.

A pickle may name any function, which unpickling calls. The functions here accept only pickles that name
functions and classes that the caller lists.
"""

import io
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import IO, Any

import torch

from torchtitan.tools import torch_parts

# (module, name) in a pickle -> the function or class to use.
Names = dict[tuple[str, str], Any]


def read_plain(data: Any, what: str) -> Any:
    """Unpickle `data`, which may hold numbers, strings, bytes, tensors and containers of these.

    Raises ValueError, whose message begins with `what`, if `data` holds anything else.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"{what} must be bytes, got a {type(data).__name__}")
    return read_pickle(io.BytesIO(data), _PLAIN, what)


def refusal(name: str) -> str:
    """Return the reason for refusing a file that names this function or class."""
    return f"it names {name}, which is not plain data and might execute code; nothing was executed"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: Names) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(refusal(f"{module}.{name}")) from None

    def persistent_load(self, pid: Any) -> Any:  # pid names a storage outside the pickle
        return pid


def read_pickle(file: IO[bytes], names: Names, what: str) -> Any:
    """Return the object in `file`, a pickle that may name only the functions and classes in `names`.

    Raises ValueError, whose message begins with `what`, if the pickle names anything else or is damaged.
    """
    # A pickle can set attributes of the classes that it names; restore the attributes afterwards.
    classes = [cls for cls in names.values() if isinstance(cls, type)]
    before = [dict(vars(cls)) for cls in classes]
    try:
        return _Unpickler(file, names).load()
    except Exception as error:  # a damaged pickle may raise any exception
        raise ValueError(f"{what} cannot be read: {error or type(error).__name__}") from error
    finally:
        for cls, attributes in zip(classes, before, strict=True):
            now = dict(vars(cls))
            for name in now.keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(cls, name, value)


_PLAIN: Names = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("collections", "deque"): deque,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: torch_parts.rebuild_tensor(*parts),
    # A pickled tensor names this function. torch's own version unpickles without restrictions.
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(
        io.BytesIO(data), weights_only=True
    ),
} | {("builtins", cls.__name__): cls for cls in (complex, dict, float, frozenset, int, list, set)}
