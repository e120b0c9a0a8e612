"""Loads torch's compiler, and functions that need it, on first use, because loading takes almost a second."""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torchtitan.tools import torch_parts


# These functions use import statements, because dynamo cannot trace `importlib`.
def load_flex_attention() -> ModuleType:
    import torch.nn.attention.flex_attention

    return torch.nn.attention.flex_attention


def load_varlen() -> ModuleType:
    """Return the module `torch.nn.attention.varlen`, which registers its operators."""
    import torch.nn.attention.varlen

    return torch.nn.attention.varlen


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """A context, for all threads, in which compiled modules run without their compiled code."""
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext()


def compiled_on_first_call(
    load: Callable[[], ModuleType],
    name: str,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a function whose first call loads a module and compiles the module's function `name`.

    mode, options: passed to torch.compile; options that this torch version lacks are left out.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        known = set(torch_parts.inductor_options()) if options else set()
        chosen = {key: value for key, value in (options or {}).items() if key in known}
        return torch.compile(getattr(load(), name), mode=mode, options=chosen or None)

    return lambda *args, **kwargs: compiled()(*args, **kwargs)
