"""Reading pickles without executing them.

A pickle may name any function and have it called. Here it can name only what its reader lists.
"""

import io
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import IO, Any

import torch

# (module, name) -> what stands for it.
Names = dict[tuple[str, str], Any]


def read_plain(data: Any, what: str) -> Any:
    """The numbers, strings, bytes, tensors and containers of these that `data` was pickled from.

    what: begins the message of the ValueError that is raised if there is anything else in it.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"{what} must be bytes, got a {type(data).__name__}")
    return read_pickle(io.BytesIO(data), _PLAIN, what)


def refusal(name: str) -> str:
    """Why a file that names this function or class is not read."""
    return f"it names {name}, which is no plain data and might execute code; nothing was executed"


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


def read_pickle(file: IO[bytes], names: Names, what: str) -> Any:
    """What `file` holds, if it names nothing but `names`; else ValueError, which begins with
    `what`."""
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


_PLAIN: Names = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("collections", "deque"): deque,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    # A pickled tensor names it; torch's own executes what it reads.
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(
        io.BytesIO(data), weights_only=True
    ),
} | {("builtins", cls.__name__): cls for cls in (complex, dict, float, frozenset, int, list, set)}
