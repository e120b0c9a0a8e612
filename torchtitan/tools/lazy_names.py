"""Names of a package whose modules are loaded on first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def load_on_access(module: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for the top of a module (PEP 562).

    module: its `__name__`. module_of: name -> the module that defines it, with a leading dot
    relative to the package `module`.
    """

    def __getattr__(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], module), name)

    return __getattr__
