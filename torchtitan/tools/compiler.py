"""What loads torch's compiler, which takes most of a second: asked for where it is used."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def load_flex_attention() -> ModuleType:
    """The module `torch.nn.attention.flex_attention`."""
    import torch.nn.attention.flex_attention  # slow, see the top

    return torch.nn.attention.flex_attention


def load_varlen() -> ModuleType:
    """The module `torch.nn.attention.varlen`, which registers its operators."""
    import torch.nn.attention.varlen  # slow, see the top

    return torch.nn.attention.varlen


def load_inductor() -> ModuleType:
    """The module `torch._inductor`, with its `config`."""
    import torch._inductor.config  # slow, see the top

    return torch._inductor


def compiled_on_first_call(
    load: Callable[[], ModuleType],
    name: str,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what calls the function `name` of a module, loaded and compiled by the first call.

    mode, options: torch.compile's; options that this torch does not know are left out.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        known = set(load_inductor().list_options()) if options else set()
        chosen = {key: value for key, value in (options or {}).items() if key in known}
        return torch.compile(getattr(load(), name), mode=mode, options=chosen or None)

    return lambda *args, **kwargs: compiled()(*args, **kwargs)
