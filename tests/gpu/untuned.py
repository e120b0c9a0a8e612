"""pytest plug-in: kernels without autotuning, which takes most of the time of `tests/gpu`.

python -m pytest -p tests.gpu.untuned tests/gpu

Each process compiles by itself, because processes of pytest share the cores already.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

_TUNING = ("max_autotune", "coordinate_descent_tuning")
_compile = torch.compile


def compile_untuned(
    *args: Any, mode: str | None = None, options: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """As `torch.compile`, but the first configuration of each kernel is taken."""
    if mode is not None and mode.startswith("max-autotune"):
        mode = None
    if options is not None:
        options = {key: value for key, value in options.items() if key not in _TUNING} or None
    return _compile(*args, mode=mode, options=options, **kwargs)


def pytest_configure() -> None:
    torch.compile = compile_untuned
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def pytest_unconfigure() -> None:
    torch.compile = _compile
