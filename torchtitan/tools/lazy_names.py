"""Names that are imported on first use, and stand-ins for functions that are not available."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def load_on_access(module: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` (PEP 562).

    module: the `__name__` of the module. module_of: name -> the module that defines the name; with a
    leading dot it is relative to the package `module`.
    """

    def __getattr__(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], module), name)

    return __getattr__


def not_available(remedy: str) -> type:
    """Return a stand-in for a function or class of torchtitan 0.2.x that this package lacks.

    Calling the stand-in or a subclass raises NotImplementedError(remedy).
    """

    class NotAvailable:
        def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(remedy)

    return NotAvailable
