"""Converters change a model in place before it is parallelized, e.g. to float8."""

import importlib
from typing import Protocol

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger


class ModelConverter(Protocol):
    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None: ...

    def convert(self, model: nn.Module) -> None:
        """Change `model` in place; its parameters may be on the meta device."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Called after each optimizer step with the model or its parts."""


class UnknownConverterError(KeyError, ValueError):
    """A name in `model.converters` is not registered."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError would show the message's repr


# Name -> (module, class), imported on first use.
_BUILT_IN_CONVERTERS = {
    "lora": ("adapters.converter", "LoRAConverter"),
    "quantize.linear.float8": ("quantization.float8", "Float8LinearConverter"),
    "quantize.grouped_mm.float8": ("quantization.float8", "Float8GroupedMMConverter"),
    "quantize.linear.mx": ("quantization.mx", "MXLinearConverter"),
    "quantize.grouped_mm.mx": ("quantization.mx", "MXGroupedMMConverter"),
}

_registry_model_converter_cls: dict[str, type[ModelConverter]] = {}


def register_model_converter(converter_cls: type[ModelConverter], name: str) -> None:
    """Register `converter_cls` under `name` for `model.converters`. AssertionError for a taken name."""
    assert name not in known_converter_names(), f"a model converter named {name!r} exists already"
    _registry_model_converter_cls[name] = converter_cls


def known_converter_names() -> list[str]:
    """The names that `model.converters` may hold, sorted."""
    return sorted({*_BUILT_IN_CONVERTERS, *_registry_model_converter_cls})


def find_model_converter(name: str) -> type[ModelConverter]:
    """Return the registered class; UnknownConverterError, with the registered names, if there is none."""
    if name in _registry_model_converter_cls:
        return _registry_model_converter_cls[name]
    if name not in _BUILT_IN_CONVERTERS:
        raise UnknownConverterError(
            f"model.converters: {name!r} is unknown; the choices are {known_converter_names()}. "
            "experimental.custom_import can name a module that registers more"
        )
    module, class_name = _BUILT_IN_CONVERTERS[name]
    return getattr(importlib.import_module(f"torchtitan.{module}"), class_name)


class ModelConvertersContainer(ModelConverter):
    """Applies the converters in `model.converters`, possibly none, in order."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        self.converters: list[ModelConverter] = [
            find_model_converter(name)(job_config, parallel_dims)
            for name in job_config.model.converters
        ]
        self.print_after_conversion = job_config.model.print_after_conversion

    def convert(self, model: nn.Module) -> None:
        for converter in self.converters:
            converter.convert(model)
        if self.print_after_conversion:
            logger.info("The model after conversion:\n%s", model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for converter in self.converters:
            converter.post_optimizer_hook(model)


build_model_converters = ModelConvertersContainer
